"""Budgets that are worked out: what a stage cannot do without, and its share of the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelaunch.core.budgets import (
    ASSUMED_CONTEXT_BYTES,
    AutoStage,
    Forecasts,
    auto_budgets,
    context_term,
    forecast_ledger,
    headroom_bytes,
    least_budget,
    plan_budgets,
)
from stagelaunch.core.config import Deployment
from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.ledger import KVLayout, Source, Term, shortage, smallest_budget
from stagelaunch.core.need import StageNeed
from stagelaunch.core.plan import make_plan, refusal
from stagelaunch.core.units import GIB, MIB

TALKER = KVLayout(num_layers=20, num_kv_heads=2, head_dim=128, dtype_bytes=2, block_size=16)
CONTEXT = 64 * MIB
NO_KV = StageNeed(GIB, 4 * GIB, 200 * MIB, None)
WITH_KV = StageNeed(6 * GIB, GIB, 300 * MIB, TALKER)


def stage(stage_id: int, need: StageNeed, weight: float = 1.0, max_model_len: int = 4096) -> AutoStage:
    return AutoStage(stage_id, need, max_model_len, weight)


def test_a_stage_without_kv_gets_what_it_needs_and_the_others_the_rest_by_weight() -> None:
    stages = [stage(0, WITH_KV), stage(1, WITH_KV, 3.0), stage(2, NO_KV)]
    least = {each.stage_id: least_budget(each, CONTEXT) for each in stages}
    found = auto_budgets(60 * GIB, stages, CONTEXT)
    assert found[2] == least[2]
    rest = 60 * GIB - sum(least.values())
    assert (found[0] - least[0], found[1] - least[1]) == (rest // 4, rest * 3 // 4)


def test_the_least_is_enough_for_the_forecast_its_headroom_and_one_request_and_no_byte_more() -> None:
    for each in (stage(0, WITH_KV), stage(1, NO_KV)):
        need, layout = each.need, each.need.layout
        request = 0 if layout is None else layout.blocks_for(4096) * layout.block_bytes
        work = need.weights_bytes + need.activations_bytes + need.graphs_bytes + headroom_bytes(need)
        assert least_budget(each, CONTEXT) == smallest_budget(CONTEXT + work + request)


def test_a_device_that_is_too_small_is_given_the_least_so_that_admission_says_by_how_much() -> None:
    stages = [stage(0, WITH_KV), stage(1, NO_KV)]
    assert auto_budgets(GIB, stages, CONTEXT) == {each.stage_id: least_budget(each, CONTEXT) for each in stages}


needs = st.builds(
    StageNeed,
    st.integers(0, 60 * GIB),
    st.integers(0, 10 * GIB),
    st.integers(0, GIB),
    st.none() | st.builds(KVLayout, *[st.integers(1, 64)] * 3, st.sampled_from([1, 2, 4]), st.integers(1, 64)),
)


@given(
    st.lists(st.tuples(needs, st.floats(0.001, 1000)), min_size=1, max_size=5),
    st.integers(0, 200 * GIB),
    st.integers(0, GIB),
)
def test_budgets_never_exceed_the_device_and_always_hold_their_stage(
    asked: list[tuple[StageNeed, float]], available: int, context: int
) -> None:
    stages = [stage(i, need, weight, 100) for i, (need, weight) in enumerate(asked)]
    found = auto_budgets(available, stages, context)
    least = sum(least_budget(each, context) for each in stages)
    assert sum(found.values()) <= max(available, least)
    for each in stages:
        ledger = forecast_ledger(
            Term(found[each.stage_id], Source.AUTO_BUDGET), each.need, Term(context, Source.CONFIG)
        )
        assert shortage(ledger, each.need.layout, each.max_model_len, 1 << 50) is None


def deployment(*budgets: dict[str, Any]) -> Deployment:
    stages = [
        {"id": i, "name": f"s{i}", "devices": [0], "component": "x", "engine": "a:B", "max_num_seqs": 1,
         "max_num_batched_tokens": 1, "max_model_len": 4096, **budget}
        for i, budget in enumerate(budgets)
    ]  # fmt: skip
    body = {"name": "d", "model": "m", "backend": "cuda", "reserve": "1GiB", "stages": stages}
    return Deployment.model_validate(body)


def test_what_is_written_is_taken_off_before_the_rest_is_shared() -> None:
    made = deployment({"budget": "auto"}, {"utilization": 0.25}, {"budget": "10GiB"})
    found = plan_budgets(made, {0: 80 * GIB}, Forecasts(context_term(None), {0: WITH_KV}))
    assert found.by_stage == {0: 80 * GIB - 3 * GIB - 20 * GIB - 10 * GIB, 1: 0.25, 2: 10 * GIB}
    assert found.findings == ()


def test_an_auto_stage_nobody_could_forecast_is_said_with_the_reason() -> None:
    found = plan_budgets(
        deployment({"budget": "auto"}), {0: GIB}, Forecasts(context_term(None), errors={0: "no torch"})
    )
    assert found.by_stage == {}
    assert found.findings == (
        "stage s0: cannot work out its budget: no torch; give it a utilization or a budget in bytes",
    )


@pytest.mark.parametrize(("said", "term"), [(5, Term(5, Source.CONFIG)), (0, Term(0, Source.CONFIG))])
def test_a_context_is_what_the_simulated_machine_says_or_assumed(said: int, term: Term) -> None:
    assert context_term(said) == term
    assert context_term(None) == Term(ASSUMED_CONTEXT_BYTES, Source.ASSUMED)


def test_an_auto_stage_on_a_device_that_is_not_there_is_missing_and_not_forgotten() -> None:
    made = deployment({"budget": "auto"})
    plan = make_plan(made, {1: GIB}, forecasts=Forecasts(context_term(None), {0: WITH_KV}))
    assert isinstance(refusal(plan), NoDeviceError)
    assert plan.missing == ("device 0: asked for by stage 0, but there is no such device; name one that is there (1)",)
