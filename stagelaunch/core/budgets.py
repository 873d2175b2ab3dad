"""Budgets that stagelaunch works out itself: what a stage with ``budget: auto`` gets of its device, and why.

Not a measurement: needs are forecast from the checkpoint (``worker.forecast``), totals come from the caller. Each auto
stage gets what it cannot do without; what is left of the device goes to those that keep KV cache, by their weights.
Called by ``core.plan``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagelaunch.core.admission import budget_bytes
from stagelaunch.core.config import Deployment, Stage
from stagelaunch.core.identity import DeviceRef
from stagelaunch.core.ledger import Ledger, Source, Term, fill_ledger, smallest_budget
from stagelaunch.core.need import StageNeed
from stagelaunch.core.units import GIB

ASSUMED_CONTEXT_BYTES = GIB
"""Of a real device: its context and what libraries take beside the allocator. Nothing tells before there is one."""
HEADROOM_SHARE = 20
"""A forecast does not know every workspace of every kernel: one part in so many of what computing takes is added."""


@dataclass(frozen=True)
class AutoStage:
    """One stage on a device, as its budget is worked out there."""

    stage_id: int
    need: StageNeed
    max_model_len: int
    kv_weight: float


def headroom_bytes(need: StageNeed) -> int:
    """What is added to a forecast."""
    return (need.activations_bytes + need.graphs_bytes) // HEADROOM_SHARE


def least_budget(stage: AutoStage, context_bytes: int) -> int:
    """The smallest budget the stage can boot with: its need, its margin and one request of KV cache."""
    need, layout = stage.need, stage.need.layout
    request_bytes = 0 if layout is None else layout.blocks_for(stage.max_model_len) * layout.block_bytes
    return smallest_budget(context_bytes + need.total_bytes + headroom_bytes(need) + request_bytes)


def auto_budgets(available_bytes: int, stages: Sequence[AutoStage], context_bytes: int) -> dict[int, int]:
    """Budgets by stage id of the auto stages of one device, on which all of them together may take ``available_bytes``.

    What exceeds their least budgets goes to the stages with KV cache, in proportion to ``kv_weight``; a device that has
    not even the least gives exactly that, so that whoever adds up finds it over-full, and by how much.
    """
    least = {stage.stage_id: least_budget(stage, context_bytes) for stage in stages}
    rest_bytes = max(0, available_bytes - sum(least.values()))
    sharing = [stage for stage in stages if stage.need.layout is not None]
    weights = sum(stage.kv_weight for stage in sharing)
    return least | {
        stage.stage_id: least[stage.stage_id] + int(rest_bytes * (stage.kv_weight / weights)) for stage in sharing
    }


@dataclass(frozen=True)
class Forecasts:
    """What is known about the needs of stages before they run, by stage id."""

    context: Term
    """What a context costs on these devices."""
    needs: Mapping[int, StageNeed] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    """Why a stage could not be forecast."""


@dataclass(frozen=True)
class Budgets:
    """What each stage of a deployment may hold, as far as it can be said."""

    by_stage: Mapping[int, float | int]
    findings: tuple[str, ...]
    """One for each auto stage whose budget cannot be worked out."""


def plan_budgets(deployment: Deployment, device_totals: Mapping[int, int], forecasts: Forecasts) -> Budgets:
    """Budgets as written, and the auto ones worked out on the devices that have a total."""
    written = {stage.id: stage.demand for stage in deployment.stages if stage.demand is not None}
    auto = [stage for stage in deployment.stages if stage.demand is None]
    known = [stage for stage in auto if stage.id in forecasts.needs]
    found: dict[int, float | int] = dict(written)
    # Of a device that nobody knows any share is unknown; the stage still asks for it.
    found |= {stage.id: 1.0 for stage in known if device_totals.keys().isdisjoint(stage.devices)}
    everybody, sharing = _by_device(deployment.stages), _by_device(known)
    for device, total_bytes in device_totals.items():
        here = [_auto_stage(stage, forecasts) for stage in sharing.get(device, ())]
        available_bytes = total_bytes - _taken_bytes(deployment, everybody.get(device, ()), total_bytes)
        found |= auto_budgets(available_bytes, here, forecasts.context.size_bytes)
    return Budgets(found, tuple(_unknown(stage, forecasts) for stage in auto if stage.id not in forecasts.needs))


def _by_device(stages: Iterable[Stage]) -> dict[DeviceRef, list[Stage]]:
    found: dict[DeviceRef, list[Stage]] = {}
    for stage in stages:
        for device in stage.devices:
            found.setdefault(device, []).append(stage)
    return found


def _taken_bytes(deployment: Deployment, here: Sequence[Stage], total_bytes: int) -> int:
    """Every reserve on a device, and the budgets that are written, of the stages that use it."""
    budgets = (budget_bytes(stage.demand, total_bytes) for stage in here if stage.demand is not None)
    return sum(budget or 0 for budget in budgets) + len(here) * deployment.reserve_bytes


def _auto_stage(stage: Stage, forecasts: Forecasts) -> AutoStage:
    weight = 1.0 if stage.kv_weight is None else stage.kv_weight
    return AutoStage(stage.id, forecasts.needs[stage.id], stage.max_model_len, weight)


def _unknown(stage: Stage, forecasts: Forecasts) -> str:
    why = forecasts.errors.get(stage.id, "nobody has looked at its checkpoint")
    return f"stage {stage.name}: cannot work out its budget: {why}; give it a utilization or a budget in bytes"


def forecast_ledger(budget: Term, need: StageNeed, context: Term) -> Ledger:
    """Where every byte of a budget will go, as far as can be said before there is a process."""
    return fill_ledger(
        budget=budget,
        context=context,
        weights=Term(need.weights_bytes, Source.FORECAST),
        activations=Term(need.activations_bytes, Source.FORECAST),
        non_torch=Term(0, Source.ASSUMED),
        graphs=Term(need.graphs_bytes, Source.FORECAST),
        layout=need.layout,
    )


def context_term(simulated_context_bytes: int | None) -> Term:
    """What a context will cost: a simulated machine says so, for a real one it is assumed."""
    if simulated_context_bytes is not None:
        return Term(simulated_context_bytes, Source.CONFIG)
    return Term(ASSUMED_CONTEXT_BYTES, Source.ASSUMED)
