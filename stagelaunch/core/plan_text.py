"""A plan as people read it: aligned tables, the verdict in the last line. ASCII only, for any terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagelaunch.core.phases import STEPS
from stagelaunch.core.plan import DevicePlan, Plan, StagePlan
from stagelaunch.core.units import format_size

Row = Sequence[str]


def render_plan(plan: Plan) -> str:
    """The whole plan; findings stand in full in ``plan.findings``, here only as amounts and the verdict."""
    stages = {stage.stage: stage for stage in plan.stages}
    blocks = [
        [_headline(plan)],
        ["boot order", *_order_lines(plan, stages)],
        ["memory", *_table(("device", "stage", "budget", "reserve", "weights"), _memory_rows(plan, stages))],
        ["devices", *_device_table(plan)],
        ["steps of every stage", *_table(("phase", "step", "device lock", "why"), _step_rows())],
        [f"verdict: {_verdict(plan)}"],
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _headline(plan: Plan) -> str:
    parts = f"{_count(len(plan.stages), 'stage')} in {_count(len(plan.groups), 'group')}"
    return f"{plan.deployment}: {parts}, {plan.order} order, {plan.backend} devices"


_DEVICE_HEAD = ("device", "total", "needed", "left", "short by", "free now", "short now by")


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
    return [
        (
            str(device.verdict.device),
            f"{demand.stage_id} {stages[demand.stage_id].name}",
            _size(demand.budget_bytes),
            _size(device.verdict.reserve_bytes),
            _size(stages[demand.stage_id].weights_bytes),
        )
        for device in plan.devices
        for demand in device.verdict.demands
    ]


def _device_table(plan: Plan) -> list[str]:
    lines = [_DEVICE_HEAD, *map(_device_row, plan.devices)]
    # Numbers alone, for a machine that is not at hand: nothing to tell apart.
    if any(device.uuid for device in plan.devices):
        uuids = ("uuid", *(device.uuid or "-" for device in plan.devices))
        lines = [(*line, uuid) for line, uuid in zip(lines, uuids)]
    return _table(lines[0], lines[1:])


def _device_row(device: DevicePlan) -> Row:
    verdict, free = device.verdict, device.free
    return (
        str(verdict.device),
        "not there" if verdict.total_bytes is None else format_size(verdict.total_bytes),
        _size(verdict.needed_bytes),
        _size(device.left_bytes),
        _size(verdict.shortfall_bytes or None),
        _size(None if free is None else free.available_bytes),
        _size((free.shortfall_bytes or None) if free else None),
    )


def _step_rows() -> list[Row]:
    return [(step.phase, step.name, step.lock, step.why) for step in STEPS]


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _verdict(plan: Plan) -> str:
    if plan.over_full:
        return f"can never fit ({_count(len(plan.over_full), 'finding')})"
    if plan.missing:
        return f"{_count(len(plan.missing), 'device')} not there"
    if plan.not_now:
        return f"does not fit now ({_count(len(plan.not_now), 'device')} short)"
    return "fits"


def _table(head: Row, rows: Iterable[Row]) -> list[str]:
    """Lines of a table, columns as wide as their widest cell, indented by two."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
