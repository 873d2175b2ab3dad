"""What a deployment will do to a machine, before it does: groups, order, memory per device, locks, verdict.

Not the rule of what fits (``core.admission``) and not a measurement: totals, free bytes, holders and weight sizes are
data the caller read. Called by ``plan`` and by the supervisor before anything starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stagelaunch.core.admission import (
    DeviceVerdict,
    FreeVerdict,
    admission_findings,
    claim_check,
    claimant,
    device_verdicts,
    free_check,
    free_verdicts,
    process_text,
)
from stagelaunch.core.budgets import Forecasts, context_term, forecast_ledger, plan_budgets
from stagelaunch.core.claims import Claim, Holder
from stagelaunch.core.config import Deployment, Stage
from stagelaunch.core.errors import DoesNotFitNowError, FindingsError, NeverFitsError, NoDeviceError
from stagelaunch.core.groups import init_groups
from stagelaunch.core.identity import Resolution
from stagelaunch.core.inventory import DeviceInfo
from stagelaunch.core.ledger import KVLayout, Ledger, Source, Term, margin_bytes, shortage
from stagelaunch.core.units import format_size


@dataclass(frozen=True)
class StagePlan:
    """One stage as the plan shows it."""

    stage: int
    name: str
    devices: tuple[int, ...]
    capture_sizes: tuple[int, ...]
    weights_bytes: int | None
    """All of its weights, over all its devices; None where the checkpoint was not read."""
    forecast: Ledger | None = None
    """Where its budget will go on its first device; None where its need was not forecast."""
    layout: KVLayout | None = None
    """Of its KV cache, by the forecast."""
    forecast_error: str | None = None
    """Why its need could not be forecast, where it was asked for."""


@dataclass(frozen=True)
class DevicePlan:
    """One device: what it has, what is asked of it, what remains."""

    verdict: DeviceVerdict
    free: FreeVerdict | None
    """Against what is free now; None where nobody asked the machine, or no stage uses the device."""
    uuid: str | None = None
    """Which device it is; how the config names one that is not there; None for a mere number."""

    @property
    def left_bytes(self) -> int | None:
        """What no stage asks for; None for a device nobody knows."""
        if self.verdict.total_bytes is None or self.verdict.needed_bytes is None:
            return None
        return max(0, self.verdict.total_bytes - self.verdict.needed_bytes)


@dataclass(frozen=True)
class Plan:
    """Everything that can be said before a process starts."""

    deployment: str
    backend: str
    order: str
    groups: tuple[tuple[int, ...], ...]
    stages: tuple[StagePlan, ...]
    devices: tuple[DevicePlan, ...]
    unplanned: tuple[str, ...]
    """One finding per stage whose budget cannot be worked out."""
    missing: tuple[str, ...]
    """One finding per device that is not there."""
    over_full: tuple[str, ...]
    """One finding per device whose total is too small, and per stage whose budget cannot hold its weights, or what it
    is forecast to need."""
    not_now: tuple[str, ...]
    """One finding per device that would do, were it not for who holds its memory now."""
    claimed: tuple[str, ...]
    """One finding per device of which other deployments have claimed too much."""
    damaged: tuple[str, ...] = ()
    """What is wrong with the checkpoint: the sizes of its weights are not known, and nothing could be read from it."""

    @property
    def findings(self) -> tuple[str, ...]:
        """Everything that speaks against a boot."""
        return self.damaged + self.unplanned + self.missing + self.over_full + self.not_now + self.claimed

    def auto_budget_bytes(self, stage: Stage) -> int | None:
        """The budget that was worked out for a stage; None for one that has its own."""
        return None if stage.demand is not None else self._demands.get((stage.device_indices[0], stage.id))

    @cached_property
    def _demands(self) -> Mapping[tuple[int, int], int | None]:
        return _demands([device.verdict for device in self.devices])

    @property
    def fits(self) -> bool:
        """Nothing speaks against a boot."""
        return not self.findings


def make_plan(
    deployment: Deployment,
    device_totals: Mapping[int, int],
    weights_bytes: Mapping[int, int] | None = None,
    *,
    forecasts: Forecasts | None = None,
    free_bytes: Mapping[int, int] | None = None,
    holders: Mapping[int, Collection[Holder]] | None = None,
    claims: Mapping[int, Collection[Claim]] | None = None,
    uuids: Mapping[int, str] | None = None,
    absent: Mapping[int, str] | None = None,
) -> Plan:
    """The plan of a deployment on devices with these totals, in bytes by device index.

    ``weights_bytes`` by stage id, as far as known; ``forecasts`` likewise, without which no auto budget is known. With
    ``free_bytes`` the plan also says what fits now; it must then have every device that has a total (KeyError).
    ``claims`` are those of other deployments. ``absent`` has the finding for a device without a total, where more is
    known than that it is not there.
    """
    forecasts = forecasts or Forecasts(context_term(None))
    budgets = plan_budgets(deployment, device_totals, forecasts)
    asks = {
        stage.id: (stage.device_indices, budgets.by_stage[stage.id])
        for stage in deployment.stages
        if stage.id in budgets.by_stage
    }
    verdicts = device_verdicts(asks, device_totals, deployment.reserve_bytes)
    known = [verdict for verdict in verdicts if verdict.total_bytes is not None]
    findings = {**admission_findings(verdicts), **(absent or {})}
    over_full = [findings[verdict.device] for verdict in known if verdict.device in findings]
    demands = _demands(verdicts)
    stages = tuple(_stage_plan(stage, weights_bytes or {}, forecasts, demands) for stage in deployment.stages)
    now = () if free_bytes is None else free_verdicts(verdicts, free_bytes, holders or {}, claims or {})
    # Only of devices that could do: the others have their finding already.
    fitting_now = [free for free in now if free.verdict.fits]
    return Plan(
        deployment=deployment.name,
        backend=deployment.backend,
        order=deployment.order,
        groups=tuple(tuple(group) for group in init_groups(deployment.stage_devices)),
        stages=stages,
        devices=_device_plans(verdicts, now, uuids or {}),
        missing=tuple(findings[verdict.device] for verdict in verdicts if verdict.total_bytes is None),
        unplanned=budgets.findings,
        over_full=(
            *over_full,
            *_too_heavy(deployment.stages, verdicts, weights_bytes or {}),
            *_too_tight(deployment.stages, stages, verdicts),
        ),
        not_now=tuple(free_check(fitting_now)),
        claimed=tuple(claim_check(fitting_now)),
    )


def make_plan_now(
    deployment: Deployment,
    resolved: Resolution,
    claims: Mapping[int, Collection[Claim]],
    weights_bytes: Mapping[int, int] | None = None,
    forecasts: Forecasts | None = None,
) -> Plan:
    """The plan of a deployment on the devices it means on this machine, as they are now.

    ``claims`` of other deployments, by device index.
    """
    devices = resolved.devices
    return make_plan(
        deployment.on_devices(resolved.numbers),
        {info.index: info.total_bytes for info in devices},
        weights_bytes,
        forecasts=forecasts,
        free_bytes={info.index: info.free_bytes for info in devices},
        holders={info.index: device_holders(info) for info in devices},
        claims=claims,
        uuids={**{info.index: info.uuid for info in devices}, **resolved.written},
        absent=resolved.absent,
    )


def device_holders(info: DeviceInfo) -> tuple[Holder, ...]:
    """Who holds memory of a device."""
    return tuple(Holder(process.pid, process.size_bytes, process.name) for process in info.processes)


def refusal(plan: Plan) -> FindingsError | None:
    """The error to raise for a plan that does not fit, with all its findings; None for one that does.

    What can never fit weighs most, for no waiting and no other machine helps; then a device that is not there.
    """
    if plan.over_full or plan.unplanned:
        return NeverFitsError(plan.findings)
    if plan.missing:
        return NoDeviceError(plan.findings)
    return DoesNotFitNowError(plan.findings, _in_the_way(plan)) if plan.not_now or plan.claimed else None


def _in_the_way(plan: Plan) -> frozenset[str]:
    short = [device.free for device in plan.devices if device.free and device.free.shortfall_bytes]
    processes = {process_text(holder) for free in short for holder in free.holders}
    return frozenset(processes | {claimant(held.claim) for free in short for held in free.claims})


def _stage_plan(
    stage: Stage,
    weights_bytes: Mapping[int, int],
    forecasts: Forecasts,
    demands: Mapping[tuple[int, int], int | None],
) -> StagePlan:
    need = forecasts.needs.get(stage.id)
    budget_bytes = demands.get((stage.device_indices[0], stage.id))
    ledger = None
    if need is not None and budget_bytes is not None:
        ledger = forecast_ledger(Term(budget_bytes, _budget_source(stage)), need, forecasts.context)
    return StagePlan(
        stage.id,
        stage.name,
        stage.device_indices,
        stage.capture_sizes,
        weights_bytes.get(stage.id),
        ledger,
        None if need is None else need.layout,
        forecasts.errors.get(stage.id),
    )


def _budget_source(stage: Stage) -> Source:
    if stage.demand is None:
        return Source.AUTO_BUDGET
    return Source.CONFIG_BUDGET if stage.utilization is None else Source.CONFIG_UTILIZATION


def _demands(verdicts: Sequence[DeviceVerdict]) -> dict[tuple[int, int], int | None]:
    """What each stage asks of each of its devices: by device and stage."""
    return {
        (verdict.device, demand.stage_id): demand.budget_bytes for verdict in verdicts for demand in verdict.demands
    }


def _too_tight(stages: Sequence[Stage], planned: Sequence[StagePlan], verdicts: Sequence[DeviceVerdict]) -> list[str]:
    """One text per stage that will not fit its budget, by the forecast."""
    totals = {verdict.device: verdict.total_bytes for verdict in verdicts}
    texts = []
    for stage, plan in zip(stages, planned):
        total_bytes = totals.get(stage.device_indices[0])
        if plan.forecast is None or total_bytes is None:
            continue
        short = shortage(plan.forecast, plan.layout, stage.max_model_len, total_bytes)
        if short is not None:
            texts.append(f"stage {stage.id} ({stage.name}): by forecast {short}")
    return texts


def _device_plans(
    verdicts: Sequence[DeviceVerdict], now: Sequence[FreeVerdict], uuids: Mapping[int, str]
) -> tuple[DevicePlan, ...]:
    free = {item.verdict.device: item for item in now}
    return tuple(DevicePlan(verdict, free.get(verdict.device), uuids.get(verdict.device)) for verdict in verdicts)


def _too_heavy(
    stages: Sequence[Stage], verdicts: Sequence[DeviceVerdict], weights_bytes: Mapping[int, int]
) -> list[str]:
    """One text per stage whose weights and margin alone exceed its budget. How ranks split them is not known: the sums
    count."""
    budgets: dict[int, list[int | None]] = {}
    for verdict in verdicts:
        for demand in verdict.demands:
            budgets.setdefault(demand.stage_id, []).append(demand.budget_bytes)
    texts: list[str] = []
    for stage in stages:
        parts = [part for part in budgets.get(stage.id, []) if part is not None]
        weights, budget = weights_bytes.get(stage.id, 0), sum(parts)
        margin = sum(map(margin_bytes, parts))
        if len(parts) == len(stage.devices) and weights + margin > budget:
            # Those of an engine that is not ours are not known.
            what = f"weights take {format_size(weights)} and its margin" if weights else "margin takes"
            texts.append(
                f"stage {stage.id} ({stage.name}): its {what} {format_size(margin)}, its budget is "
                f"{format_size(budget)}; raise the budget or use larger devices"
            )
    return texts
