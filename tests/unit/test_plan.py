from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stagelaunch.cli.plan import parse_device_totals
from stagelaunch.config_file import load_deployment
from stagelaunch.core.budgets import Forecasts, context_term
from stagelaunch.core.claims import Claim, Holder
from stagelaunch.core.config import Deployment, to_raw
from stagelaunch.core.errors import DoesNotFitNowError, NeverFitsError, NoDeviceError, UsageError
from stagelaunch.core.need import StageNeed
from stagelaunch.core.phases import STEPS
from stagelaunch.core.plan import make_plan, refusal
from stagelaunch.core.plan_json import plan_to_json
from stagelaunch.core.plan_text import render_plan
from stagelaunch.core.units import GIB, MIB

CONFIGS = Path(__file__).parents[2] / "configs"
H100 = load_deployment(CONFIGS / "qwen3-omni-2xh100.yaml").deployment


def changed(**fields: Any) -> Deployment:
    return Deployment.model_validate({**to_raw(H100), **fields})


def moved(devices: dict[str, list[int]]) -> Deployment:
    stages = [{**stage, "devices": devices.get(stage["name"], stage["devices"])} for stage in to_raw(H100)["stages"]]
    return changed(stages=stages)


def test_the_shipped_deployment_on_two_cards() -> None:
    plan = make_plan(H100, {0: 80 * GIB, 1: 80 * GIB})
    body = plan_to_json(plan)
    assert (plan.fits, plan.findings, refusal(plan)) == (True, (), None)
    assert body["groups"] == [[0], [1, 2]]
    assert [step["lock"] for step in body["steps"]] == [str(step.lock) for step in STEPS]
    assert body["devices"][1] == {
        "id": 1,
        "uuid": None,
        "total_bytes": 80 * GIB,
        "demands": [
            {"stage": 1, "name": "talker", "budget_bytes": int(0.6 * 80 * GIB), "reserve_bytes": 2 * GIB},
            {"stage": 2, "name": "code2wav", "budget_bytes": 8 * GIB, "reserve_bytes": 2 * GIB},
        ],
        "reserve_bytes": 2 * GIB,
        "needed_bytes": 60 * GIB,
        "shortfall_bytes": 0,
        "left_bytes": 20 * GIB,
        "free_bytes": None,
        "available_bytes": None,
        "shortfall_now_bytes": None,
        "claims": None,
    }
    assert json.loads(json.dumps(body)) == body


def test_equal_is_enough_and_one_byte_more_is_not() -> None:
    deployment = moved({"thinker": [1], "code2wav": [2]})
    stages = [{**stage, "utilization": 0.5} for stage in to_raw(deployment)["stages"]]
    totals = {1: 8 * GIB, 2: 8 * GIB}
    assert make_plan(changed(stages=stages, reserve="0B"), totals).fits
    over = make_plan(changed(stages=stages, reserve="1B"), totals)
    assert plan_to_json(over)["devices"][0]["shortfall_bytes"] == 2
    assert isinstance(refusal(over), NeverFitsError)


def test_every_over_full_device_has_its_finding() -> None:
    plan = make_plan(changed(reserve="30GiB"), {0: 80 * GIB, 1: 80 * GIB})
    error = refusal(plan)
    assert isinstance(error, NeverFitsError)
    assert [text.partition(":")[0] for text in error.findings] == ["device 0", "device 1"]
    assert plan_to_json(plan)["findings"] == list(error.findings)


def test_a_device_that_is_not_there() -> None:
    plan = make_plan(H100, {0: 80 * GIB})
    assert isinstance(refusal(plan), NoDeviceError)
    body = plan_to_json(plan)
    assert (body["devices"][1]["total_bytes"], body["devices"][1]["shortfall_bytes"]) == (None, None)
    assert "device 1" in body["findings"][0]
    assert render_plan(plan).endswith("verdict: 1 device not there")


def test_what_can_never_fit_weighs_more_than_what_is_not_there() -> None:
    error = refusal(make_plan(H100, {0: GIB}))
    assert isinstance(error, NeverFitsError)
    assert len(error.findings) == 2


def test_weights_larger_than_the_budget_can_never_fit() -> None:
    totals = {0: 80 * GIB, 1: 80 * GIB}
    margin = 72 * GIB // 200
    assert make_plan(H100, totals, {0: 72 * GIB - margin}).fits
    assert not make_plan(H100, totals, {0: 72 * GIB - margin + 1}).fits
    plan = make_plan(H100, totals, {0: 73 * GIB, 1: 6 * GIB})
    assert isinstance(refusal(plan), NeverFitsError)
    (finding,) = plan.findings
    assert finding.startswith("stage 0 (thinker): its weights take 73.00 GiB and its margin 368.64 MiB, its budget is")
    (*_, small) = make_plan(H100, {0: GIB // 8, 1: totals[1]}).over_full
    assert small.startswith("stage 0 (thinker): its margin takes 150.00 MiB, its budget is")
    assert "73.00 GiB" in render_plan(plan)


def test_weights_of_a_stage_over_several_devices_count_against_all_its_budgets() -> None:
    deployment = moved({"thinker": [0, 2]})
    totals = {0: 80 * GIB, 1: 80 * GIB, 2: 80 * GIB}
    assert make_plan(deployment, totals, {0: 140 * GIB}).fits
    assert not make_plan(deployment, totals, {0: 145 * GIB}).fits


def test_a_budget_on_a_device_nobody_knows_is_not_held_against_the_weights() -> None:
    plan = make_plan(moved({"thinker": [0, 7]}), {0: 80 * GIB, 1: 80 * GIB}, {0: 100 * GIB})
    assert (len(plan.missing), plan.over_full) == (1, ())


def test_what_is_free_now_decides_last() -> None:
    totals = {0: 80 * GIB, 1: 80 * GIB}
    free = {0: 80 * GIB, 1: 59 * GIB}
    held = {1: [Holder(4711, 21 * GIB, name="python")]}
    plan = make_plan(H100, totals, free_bytes=free, holders=held)
    assert isinstance(refusal(plan), DoesNotFitNowError)
    assert "pid 4711 python holds 21.00 GiB" in plan.findings[0]
    assert plan_to_json(plan)["devices"][1]["shortfall_now_bytes"] == GIB
    assert make_plan(H100, totals, free_bytes={**free, 1: 60 * GIB}, holders=held).fits


def test_what_others_have_claimed_counts_beside_what_is_free() -> None:
    totals = {0: 80 * GIB, 1: 80 * GIB}
    held = {0: [], 1: [Holder(77, 5 * GIB)]}
    claims = {1: [Claim("c0ffee", "chat", 4711, 20 * GIB, member_pids=frozenset({77}))]}
    free = {0: 80 * GIB, 1: 75 * GIB}
    assert make_plan(H100, totals, free_bytes=free, holders=held, claims=claims).fits
    claims[1] = [*claims[1], Claim("cafe", "draw", 4712, GIB)]
    plan = make_plan(H100, totals, free_bytes=free, holders=held, claims=claims)
    error = refusal(plan)
    assert isinstance(error, DoesNotFitNowError)
    assert error.in_the_way == {"deployment chat (supervisor pid 4711)", "deployment draw (supervisor pid 4712)"}
    assert (len(plan.not_now), len(plan.claimed), plan.findings) == (0, 1, plan.claimed)
    body = plan_to_json(plan)["devices"][1]
    assert (body["available_bytes"], body["shortfall_now_bytes"]) == (59 * GIB, GIB)
    assert body["claims"] == [
        {"deployment": "chat", "supervisor_pid": 4711, "claimed_bytes": 20 * GIB, "held_bytes": 5 * GIB},
        {"deployment": "draw", "supervisor_pid": 4712, "claimed_bytes": GIB, "held_bytes": None},
    ]
    text = render_plan(plan)
    assert [line.split() for line in text.splitlines() if "471" in line] == [
        ["1", "chat", "4711", "20.00", "GiB", "5.00", "GiB"],
        ["1", "draw", "4712", "1.00", "GiB", "-"],
    ]
    assert text.endswith("verdict: does not fit now (1 device short)")
    # Not even free: what is claimed of it is said too, in one finding.
    plan = make_plan(H100, totals, free_bytes={**free, 1: GIB}, holders=held, claims=claims)
    assert (len(plan.not_now), len(plan.claimed)) == (0, 1)
    assert render_plan(plan).endswith("verdict: does not fit now (1 device short)")


def test_a_device_that_can_never_do_is_not_reported_twice() -> None:
    totals = {0: 20 * GIB, 1: 80 * GIB}
    plan = make_plan(H100, totals, free_bytes={0: 0, 1: 0})
    assert [len(plan.over_full), len(plan.not_now)] == [0, 2]
    plan = make_plan(changed(reserve="3GiB"), totals, free_bytes={0: 0, 1: 0})
    assert [len(plan.over_full), len(plan.not_now)] == [1, 1]


@pytest.mark.parametrize(
    ("order", "line"), [("overlap", "talker (1) with code2wav (2)"), ("serial", "talker (1) then code2wav (2)")]
)
def test_the_text_is_aligned_and_ends_with_the_verdict(order: str, line: str) -> None:
    text = render_plan(make_plan(changed(order=order), {0: 80 * GIB, 1: 80 * GIB}))
    lines = text.splitlines()
    assert lines[-1] == "verdict: fits"
    assert f"  group 2: {line} on device 1" in lines
    rows = lines[lines.index("memory") + 1 :][:4]
    assert {row.rindex("2.00 GiB") + 8 for row in rows[1:]} == {rows[0].index("reserve") + 7}
    assert text.isascii()
    assert all(line == line.rstrip() for line in lines)


def test_device_totals() -> None:
    assert parse_device_totals(["80GiB"], [0, 3]) == {0: 80 * GIB, 3: 80 * GIB}
    assert parse_device_totals(["1=141GiB,0=80GiB"], [0, 3]) == {0: 80 * GIB, 1: 141 * GIB}
    assert parse_device_totals(["80GiB", "1=512MiB"], [0, 1]) == {0: 80 * GIB, 1: 512 * MIB}
    assert parse_device_totals(["80GiB,GPU-8932F937=1GiB"], [0, "MIG-7f"]) == {
        0: 80 * GIB,
        "MIG-7f": 80 * GIB,
        "GPU-8932f937": GIB,
    }


@pytest.mark.parametrize(
    "texts",
    [
        ["80GB"],
        [""],
        ["80GiB,"],
        ["80GiB", "90GiB"],
        ["0=1GiB,0=2GiB"],
        ["0=1GiB", "00=2GiB"],
        ["a=1GiB"],
        ["GPU-=1GiB"],
        ["GPU-8932f937=1GiB", "GPU-8932F937=2GiB"],
        ["-1=1GiB"],
        ["0GiB"],
        ["=1GiB"],
        ["0="],
        ["0=1=1GiB"],
        ["9" * 400 + "GiB"],
        ["9" * 5000],
    ],
)
def test_device_totals_that_are_none(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="write 80GiB, or 0=80GiB,1=141GiB"):
        parse_device_totals(texts, [0, 1])


def work_for(count: int, budget: dict[str, Any]) -> int:
    """How many lines are run, jumps back counted, while so many stages, two to a device, are planned."""
    given = {"devices": [0], "utilization": None, "budget": None, **budget}
    stages = [
        H100.stages[1].model_copy(update={**given, "id": n, "name": f"s{n}", "devices": (n // 2,)})
        for n in range(count)
    ]
    deployment = H100.model_copy(update={"stages": tuple(stages)})
    needs = dict.fromkeys(range(count), StageNeed(GIB, GIB, GIB, None))
    totals = dict.fromkeys(range(count // 2), 80 * GIB)
    events = 0

    def count_event(*_: object) -> Any:
        nonlocal events
        events += 1
        return count_event

    tracer = sys.gettrace()
    sys.settrace(count_event)
    try:
        plan = make_plan(deployment, totals, forecasts=Forecasts(context_term(None), needs), free_bytes=totals)
        budgets = [plan.auto_budget_bytes(stage) for stage in deployment.stages]
    finally:
        sys.settrace(tracer)
    assert plan.fits
    assert len(budgets) == count
    return events


@pytest.mark.parametrize("budget", [{"utilization": 0.4}, {"budget": "auto"}], ids=str)
def test_planning_a_stage_costs_the_same_however_many_there_are(budget: dict[str, Any]) -> None:
    assert work_for(1000, budget) < 12 * work_for(100, budget)
