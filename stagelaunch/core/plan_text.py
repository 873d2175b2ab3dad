"""A plan as people read it: aligned tables, the verdict in the last line. ASCII only, for any terminal."""

from __future__ import annotations

from collections.abc import Sequence

from stagelaunch.core.phases import STEPS
from stagelaunch.core.plan import DevicePlan, Plan, StagePlan
from stagelaunch.core.table import table
from stagelaunch.core.units import format_size, format_sizes

Row = Sequence[str]


def render_plan(plan: Plan, explanation: str | None = None) -> str:
    """The whole plan, ``explanation`` before the verdict; findings stand in full in ``plan.findings``, here only as
    amounts and the verdict.
    """
    stages = {stage.stage: stage for stage in plan.stages}
    blocks = [
        [_headline(plan)],
        ["boot order", *_order_lines(plan, stages)],
        [
            "memory",
            *table(
                [("device", "stage", "budget", "reserve", "weights"), *_memory_rows(plan, stages)],
                right=(2, 3, 4),
                indent=2,
            ),
        ],
        ["devices", *_device_table(plan)],
        *_claim_blocks(plan),
        ["steps of every stage", *table([("phase", "step", "device lock", "why"), *_step_rows()], indent=2)],
        *([] if explanation is None else [[explanation]]),
        [f"verdict: {_verdict(plan)}"],
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _headline(plan: Plan) -> str:
    parts = f"{_count(len(plan.stages), 'stage')} in {_count(len(plan.groups), 'group')}"
    return f"{plan.deployment}: {parts}, {plan.order} order, {plan.backend} devices"


_DEVICE_HEAD = ("device", "total", "needed", "left", "short by", "free now", "claimed", "short now by")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _order_lines(plan: Plan, stages: dict[int, StagePlan]) -> list[str]:
    """One line per group. Groups share no device, so they always boot at the same time."""
    joint = " then " if plan.order == "serial" else " with "
    lines = []
    for number, group in enumerate(plan.groups, start=1):
        devices = sorted({index for stage in group for index in stages[stage].devices})
        who = joint.join(f"{stages[stage].name} ({stage})" for stage in group)
        lines.append(f"  group {number}: {who} on {_device_names(devices)}")
    return lines


def _device_names(devices: Sequence[int]) -> str:
    word = "device" if len(devices) == 1 else "devices"
    return f"{word} {', '.join(map(str, devices))}" if devices else "no device"


def _memory_rows(plan: Plan, stages: dict[int, StagePlan]) -> list[Row]:
    """A row for each stage on each of its devices; all sizes in one unit, to be compared and added up."""
    found = [
        (device, stages[demand.stage_id], (demand.budget_bytes, device.verdict.reserve_bytes))
        for device in plan.devices
        for demand in device.verdict.demands
    ]
    sizes = [(*asked, stage.weights_bytes) for _, stage, asked in found]
    shown = iter(format_sizes(size for row in sizes for size in row if size is not None))
    columns = [["-" if size is None else next(shown) for size in row] for row in sizes]
    return [
        (str(device.verdict.device), f"{stage.stage} {stage.name}", *row)
        for (device, stage, _), row in zip(found, columns)
    ]


def _device_table(plan: Plan) -> list[str]:
    lines = [_DEVICE_HEAD, *map(_device_row, plan.devices)]
    # Numbers alone, for a machine that is not at hand: nothing to tell apart.
    if any(device.uuid for device in plan.devices):
        uuids = ("uuid", *(device.uuid or "-" for device in plan.devices))
        lines = [(*line, uuid) for line, uuid in zip(lines, uuids)]
    return table(lines, right=range(1, len(_DEVICE_HEAD)), indent=2)


def _device_row(device: DevicePlan) -> Row:
    verdict, free = device.verdict, device.free
    return (
        str(verdict.device),
        "not there" if verdict.total_bytes is None else format_size(verdict.total_bytes),
        _size(verdict.needed_bytes),
        _size(device.left_bytes),
        _size(verdict.shortfall_bytes or None),
        _size(None if free is None else free.free_bytes),
        _size((free.claimed_bytes or None) if free else None),
        _size((free.shortfall_bytes or None) if free else None),
    )


def _claim_blocks(plan: Plan) -> list[list[str]]:
    rows = [
        (
            str(device.verdict.device),
            held.claim.deployment,
            str(held.claim.pid),
            format_size(held.claim.claimed_bytes),
            _size(held.held_bytes),
        )
        for device in plan.devices
        if device.free is not None
        for held in device.free.claims
    ]
    head = ("device", "deployment", "supervisor pid", "claims", "holds")
    return (
        [["claims of running deployments", *table([head, *rows], right=range(3, len(head)), indent=2)]] if rows else []
    )


def _step_rows() -> list[Row]:
    return [(step.phase, step.name, step.lock, step.why) for step in STEPS]


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _verdict(plan: Plan) -> str:
    if plan.damaged:
        return "the checkpoint is damaged"
    if plan.unplanned:
        return f"no budget for {_count(len(plan.unplanned), 'stage')}"
    if plan.over_full:
        return f"can never fit ({_count(len(plan.over_full), 'finding')})"
    if plan.missing:
        return f"{_count(len(plan.missing), 'device')} not there"
    if plan.not_now or plan.claimed:
        short = sum(1 for device in plan.devices if device.verdict.fits and device.free and device.free.shortfall_bytes)
        return f"does not fit now ({_count(short, 'device')} short)"
    unknown = sum(1 for stage in plan.stages if stage.forecast_error)
    return f"fits, as far as is known ({_count(unknown, 'stage')} without a forecast)" if unknown else "fits"
