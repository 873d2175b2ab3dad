"""Whether a deployment fits its devices: by their totals, and beside what occupies them now.

The one rule, as records (`device_verdicts`, `free_verdicts`) and as texts (`admission_check`, `free_check`).
Not a measurement: totals, free bytes and holders are data the caller read. Called by `plan` and the supervisor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagelaunch.core.units import format_size

Budget = float | int
"""What a stage may hold on each of its devices: a float is a share of the device's total, an int is bytes."""


@dataclass(frozen=True)
class DeviceDemand:
    """What one stage asks of one device."""

    stage_id: int
    budget_bytes: int | None
    """None for a share of a device whose total nobody knows; never 0 for unknown."""


@dataclass(frozen=True)
class DeviceVerdict:
    """One device, everything that is asked of it, and what is missing."""

    device: int
    total_bytes: int | None
    """None for a device that a stage names and nobody knows."""
    demands: tuple[DeviceDemand, ...]
    """By ascending stage id; empty for a device that no stage uses."""
    reserve_bytes: int
    """Kept free for each stage on this device, on top of its budget."""
    needed_bytes: int | None
    """Budgets and reserves together; None for an unknown device."""
    shortfall_bytes: int | None
    """How far the need exceeds the total; 0 where it fits, None for an unknown device."""

    @property
    def fits(self) -> bool:
        """The need is at most the total; equal is enough. An unknown device never fits."""
        return self.shortfall_bytes == 0


@dataclass(frozen=True)
class Holder:
    """Somebody outside this deployment who holds a device's memory now, or has claimed it."""

    pid: int
    held_bytes: int | None
    """What the driver says the process holds; None where it does not say."""
    claimed_bytes: int = 0
    """What another deployment was admitted with for this device; 0 for a process that claims nothing."""
    name: str = ""


@dataclass(frozen=True)
class FreeVerdict:
    """One device's need against what is left of it now."""

    verdict: DeviceVerdict
    free_bytes: int
    available_bytes: int
    """Free now, less what other deployments have claimed and do not hold yet."""
    shortfall_bytes: int
    holders: tuple[Holder, ...]


def admission_check(
    stages: Mapping[int, tuple[Collection[int], float]],
    device_total_bytes: Mapping[int, int],
    reserve_bytes: int,
) -> list[str]:
    """One text for each device that is over-full or unknown, in device order; empty if everything fits.

    ``stages`` maps a stage id to its devices and its utilization (0..1). On each device the sum over its stages
    of ``int(utilization * total) + reserve_bytes`` may reach the total, not exceed it.
    """
    # float(): here the number is always a share, also the whole number 1.
    shares = {stage: (devices, float(share)) for stage, (devices, share) in stages.items()}
    return list(admission_findings(device_verdicts(shares, device_total_bytes, reserve_bytes)).values())


def device_verdicts(
    stages: Mapping[int, tuple[Collection[int], Budget]],
    device_total_bytes: Mapping[int, int],
    reserve_bytes: int,
) -> tuple[DeviceVerdict, ...]:
    """The verdict on every known device, used or not, and on every unknown one a stage names, in device order.

    A stage over several devices counts on each, by that device's own total, reserve included. ValueError for a
    budget or a reserve that is negative or not a number.
    """
    if reserve_bytes < 0:
        raise ValueError(f"cannot plan: the reserve is {reserve_bytes} bytes; give 0 or more")
    asking: dict[int, list[tuple[int, Budget]]] = {device: [] for device in device_total_bytes}
    for stage, (devices, budget) in sorted(stages.items(), key=lambda item: item[0]):
        if not 0 <= budget < math.inf:
            raise ValueError(f"cannot plan stage {stage}: its budget is {budget}; give a share or bytes")
        for device in set(devices):
            asking.setdefault(device, []).append((stage, budget))
    return tuple(
        _verdict(device, device_total_bytes.get(device), asking[device], reserve_bytes) for device in sorted(asking)
    )


def _verdict(
    device: int, total_bytes: int | None, asking: Sequence[tuple[int, Budget]], reserve_bytes: int
) -> DeviceVerdict:
    demands = tuple(DeviceDemand(stage, _budget_bytes(budget, total_bytes)) for stage, budget in asking)
    if total_bytes is None:
        return DeviceVerdict(device, None, demands, reserve_bytes, None, None)
    needed_bytes = sum((demand.budget_bytes or 0) + reserve_bytes for demand in demands)
    shortfall_bytes = max(0, needed_bytes - total_bytes)
    return DeviceVerdict(device, total_bytes, demands, reserve_bytes, needed_bytes, shortfall_bytes)


def _budget_bytes(budget: Budget, total_bytes: int | None) -> int | None:
    if isinstance(budget, int):
        return budget
    return None if total_bytes is None else int(budget * total_bytes)


def admission_findings(verdicts: Collection[DeviceVerdict]) -> dict[int, str]:
    """One text for each device that does not fit or that nobody knows, by device, in the order of the verdicts."""
    there = ", ".join(str(verdict.device) for verdict in verdicts if verdict.total_bytes is not None) or "none"
    return {
        verdict.device: _unknown(verdict, there) if verdict.total_bytes is None else _over_full(verdict)
        for verdict in verdicts
        if not verdict.fits
    }


def _unknown(verdict: DeviceVerdict, there: str) -> str:
    return (
        f"device {verdict.device}: asked for by {_names(verdict.demands)}, but there is no such device; "
        f"name one that is there ({there})"
    )


def _over_full(verdict: DeviceVerdict) -> str:
    return (
        f"{_need(verdict)}, has {format_size(verdict.total_bytes or 0)}, "
        f"short by {format_size(verdict.shortfall_bytes or 0)}; lower a budget or the reserve"
    )


def _need(verdict: DeviceVerdict) -> str:
    parts = [f"stage {demand.stage_id}: {format_size(demand.budget_bytes or 0)}" for demand in verdict.demands]
    if verdict.reserve_bytes:
        parts.append(f"reserve {len(verdict.demands)} x {format_size(verdict.reserve_bytes)}")
    return f"device {verdict.device}: needs {format_size(verdict.needed_bytes or 0)} ({', '.join(parts)})"


def _names(demands: Sequence[DeviceDemand]) -> str:
    return ", ".join(f"stage {demand.stage_id}" for demand in demands)


def free_check(
    verdicts: Iterable[DeviceVerdict],
    device_free_bytes: Mapping[int, int],
    holders: Mapping[int, Collection[Holder]],
) -> list[str]:
    """One text for each device whose need exceeds what is left now, with who holds the rest."""
    short = [free for free in free_verdicts(verdicts, device_free_bytes, holders) if free.shortfall_bytes]
    return [_free_finding(free) for free in short]


def free_verdicts(
    verdicts: Iterable[DeviceVerdict],
    device_free_bytes: Mapping[int, int],
    holders: Mapping[int, Collection[Holder]],
) -> tuple[FreeVerdict, ...]:
    """The need of each device that is used and known, against what is free there and not claimed by others.

    ``device_free_bytes`` has every device in use (KeyError): one that could not be read is for the caller to
    refuse, not to be taken as free. ``holders`` are the processes of others only.
    """
    return tuple(
        _free_verdict(verdict, device_free_bytes[verdict.device], tuple(holders.get(verdict.device, ())))
        for verdict in verdicts
        if verdict.demands and verdict.total_bytes is not None
    )


def _free_verdict(verdict: DeviceVerdict, free_bytes: int, holders: tuple[Holder, ...]) -> FreeVerdict:
    used_bytes = (verdict.total_bytes or 0) - free_bytes
    available_bytes = max(0, free_bytes - _pending_bytes(used_bytes, holders))
    shortfall_bytes = max(0, (verdict.needed_bytes or 0) - available_bytes)
    return FreeVerdict(verdict, free_bytes, available_bytes, shortfall_bytes, holders)


def _pending_bytes(used_bytes: int, holders: Sequence[Holder]) -> int:
    """What is claimed and not held yet, so that it still looks free.

    Of a claimant whose figure the driver does not give, nobody knows what it took already; what is in use and
    attributed to no one is taken to be its. Counting its claim in full would count the same bytes twice.
    """
    known = sum(holder.held_bytes for holder in holders if holder.held_bytes is not None)
    pending = sum(
        max(0, holder.claimed_bytes - holder.held_bytes) for holder in holders if holder.held_bytes is not None
    )
    unmeasured = sum(holder.claimed_bytes for holder in holders if holder.held_bytes is None)
    return pending + max(0, unmeasured - max(0, used_bytes - known))


def _free_finding(free: FreeVerdict) -> str:
    claimed_bytes = free.free_bytes - free.available_bytes
    claimed = f", of which {format_size(claimed_bytes)} is claimed by others" if claimed_bytes else ""
    held = f" (in use: {', '.join(map(_holder_text, free.holders))})" if free.holders else ""
    return (
        f"{_need(free.verdict)}, but {format_size(free.free_bytes)} is free now{claimed}{held}, "
        f"short by {format_size(free.shortfall_bytes)}; stop who holds it, or lower a budget or the reserve"
    )


def _holder_text(holder: Holder) -> str:
    who = f"pid {holder.pid} {holder.name}".rstrip()
    held = "an unknown amount" if holder.held_bytes is None else format_size(holder.held_bytes)
    claim = f", claims {format_size(holder.claimed_bytes)}" if holder.claimed_bytes else ""
    return f"{who} holds {held}{claim}"
