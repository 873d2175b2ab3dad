"""Whether a deployment fits its devices: by their totals, beside what is in use, and beside what others have claimed.

The one rule, as records (`device_verdicts`, `free_verdicts`) and as texts (`admission_check`, `free_check`,
`claim_check`). Not a measurement: totals, free bytes, holders and claims are data the caller read. Called by `plan` and
the supervisor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagelaunch.core.claims import Claim, HeldClaim, Holder, foreign_holders, held_claims, pending_bytes
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
class FreeVerdict:
    """One device's need against what is left of it now."""

    verdict: DeviceVerdict
    free_bytes: int
    available_bytes: int
    """Free now, less what other deployments have claimed and do not hold yet."""
    holders: tuple[Holder, ...]
    """Processes that belong to no claim."""
    claims: tuple[HeldClaim, ...]

    @property
    def shortfall_bytes(self) -> int:
        """How far the need exceeds what is available."""
        return self._short_of(self.available_bytes)

    @property
    def free_shortfall_bytes(self) -> int:
        """How far the need exceeds what is free, whatever is claimed."""
        return self._short_of(self.free_bytes)

    @property
    def claimed_bytes(self) -> int:
        """How much of what is free others have claimed."""
        return self.free_bytes - self.available_bytes

    def _short_of(self, left_bytes: int) -> int:
        return max(0, (self.verdict.needed_bytes or 0) - left_bytes)


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
    demands = tuple(DeviceDemand(stage, budget_bytes(budget, total_bytes)) for stage, budget in asking)
    if total_bytes is None:
        return DeviceVerdict(device, None, demands, reserve_bytes, None, None)
    needed_bytes = sum((demand.budget_bytes or 0) + reserve_bytes for demand in demands)
    shortfall_bytes = max(0, needed_bytes - total_bytes)
    return DeviceVerdict(device, total_bytes, demands, reserve_bytes, needed_bytes, shortfall_bytes)


def budget_bytes(budget: Budget, total_bytes: int | None) -> int | None:
    """A budget in bytes of a device with this total; None for a share of one that nobody knows."""
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


def free_check(verdicts: Iterable[FreeVerdict]) -> list[str]:
    """One text for each device whose need exceeds what is free now, with who holds the rest; none where claims take
    of that, too: ``claim_check`` says more."""
    return [_free_finding(free) for free in verdicts if free.free_shortfall_bytes and not free.claimed_bytes]


def claim_check(verdicts: Iterable[FreeVerdict]) -> list[str]:
    """One text for each device where what others have claimed leaves too little, with each of their deployments."""
    return [_claim_finding(free) for free in verdicts if free.shortfall_bytes and free.claimed_bytes]


def free_verdicts(
    verdicts: Iterable[DeviceVerdict],
    device_free_bytes: Mapping[int, int],
    holders: Mapping[int, Collection[Holder]],
    claims: Mapping[int, Collection[Claim]],
) -> tuple[FreeVerdict, ...]:
    """The need of each device that is used and known, against what is free there and not claimed by others.

    ``device_free_bytes`` has every device in use (KeyError): one that could not be read is for the caller to
    refuse, not to be taken as free. ``holders`` are all processes there, ``claims`` those of other deployments.
    """
    return tuple(
        _free_verdict(
            verdict,
            device_free_bytes[verdict.device],
            tuple(holders.get(verdict.device, ())),
            tuple(claims.get(verdict.device, ())),
        )
        for verdict in verdicts
        if verdict.demands and verdict.total_bytes is not None
    )


def _free_verdict(
    verdict: DeviceVerdict, free_bytes: int, holders: tuple[Holder, ...], claims: tuple[Claim, ...]
) -> FreeVerdict:
    used_bytes = (verdict.total_bytes or 0) - free_bytes
    available_bytes = max(0, free_bytes - pending_bytes(used_bytes, holders, claims))
    return FreeVerdict(
        verdict, free_bytes, available_bytes, foreign_holders(claims, holders), held_claims(claims, holders)
    )


def _free_finding(free: FreeVerdict) -> str:
    users = [_holder_text(holder) for holder in free.holders]
    users += [f"{claimant(held.claim)} {_held_text(held.held_bytes)}" for held in free.claims]
    in_use = f" (in use: {', '.join(users)})" if users else ""
    return (
        f"{_need(free.verdict)}, but {format_size(free.free_bytes)} is free now{in_use}, "
        f"short by {format_size(free.free_shortfall_bytes)}; stop who holds it, or lower a budget or the reserve"
    )


def _claim_finding(free: FreeVerdict) -> str:
    claims = ", ".join(
        f"{claimant(held.claim)} claims {format_size(held.claim.claimed_bytes)} and {_held_text(held.held_bytes)}"
        for held in free.claims
    )
    in_use = f" (in use: {', '.join(map(_holder_text, free.holders))})" if free.holders else ""
    free_now = f"{format_size(free.free_bytes)} free now{in_use}"
    return (
        f"{_need(free.verdict)}, but of the {free_now} {format_size(free.claimed_bytes)} "
        f"is claimed by running deployments ({claims}), short by {format_size(free.shortfall_bytes)} in all; "
        "stop one, or lower a budget or the reserve"
    )


def claimant(claim: Claim) -> str:
    """How a claim's owner is named to people."""
    return f"deployment {claim.deployment} (supervisor pid {claim.pid})"


def process_text(holder: Holder) -> str:
    """How a process is named to people."""
    return f"pid {holder.pid} {holder.name}".rstrip()


def _holder_text(holder: Holder) -> str:
    return f"{process_text(holder)} {_held_text(holder.held_bytes)}"


def _held_text(held_bytes: int | None) -> str:
    return f"holds {'an unknown amount' if held_bytes is None else format_size(held_bytes)}"
