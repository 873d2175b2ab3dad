"""Where every byte goes, before anything runs."""

from __future__ import annotations

import json

import pytest

from stagelaunch.config_file import load_deployment
from stagelaunch.core.budgets import Forecasts, context_term
from stagelaunch.core.config import Deployment
from stagelaunch.core.errors import NeverFitsError
from stagelaunch.core.explain_text import render_explanation
from stagelaunch.core.ledger import KVLayout
from stagelaunch.core.need import StageNeed
from stagelaunch.core.plan import Plan, make_plan, refusal
from stagelaunch.core.plan_json import plan_to_json
from stagelaunch.core.plan_text import render_plan
from stagelaunch.core.units import GIB, MIB

THINKER = KVLayout(48, 4, 128, 2, 16)
TALKER = KVLayout(20, 2, 128, 2, 16)
NEEDS = {
    0: StageNeed(int(59.082 * GIB), 2 * GIB, 300 * MIB, THINKER),
    1: StageNeed(int(6.193 * GIB), GIB, 300 * MIB, TALKER),
    2: StageNeed(int(0.402 * GIB), 3 * GIB, 200 * MIB, None),
}
TOTALS = {0: 80 * GIB, 1: 80 * GIB}


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return load_deployment("configs/qwen3-omni-2xh100.yaml").deployment


def planned(deployment: Deployment, needs: dict[int, StageNeed] = NEEDS, **errors: str) -> Plan:
    forecasts = Forecasts(context_term(None), needs, {int(key[1:]): text for key, text in errors.items()})
    return make_plan(deployment, TOTALS, {}, forecasts=forecasts)


def columns(text: str, stage: str) -> dict[str, str]:
    lines = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    head = next(row for row in cells if row[:1] == ["device"])
    return dict(zip(head, next(row for row in cells if row[1:2] == [stage])))


def test_every_byte_of_a_budget_has_its_column(deployment: Deployment) -> None:
    plan = planned(deployment)
    shown = columns(render_explanation(plan), "0 thinker")
    assert shown["weights"] == "59.08 GiB"
    assert shown["KV/token"] == "98,304 B"
    ledger = plan.stages[0].forecast
    assert ledger is not None
    left = 72 * GIB - GIB - NEEDS[0].weights_bytes - 2 * GIB - 300 * MIB - (72 * GIB) // 200
    assert (shown["blocks"], ledger.num_blocks) == (f"{left // THINKER.block_bytes:,}", left // THINKER.block_bytes)
    assert shown["tokens"] == f"{(ledger.num_blocks - 1) * 16:,}"
    total = sum(term.size_bytes for name, term in ledger.rows() if name != "budget")
    assert total + ledger.unspent_bytes == 72 * GIB


def test_a_stage_without_kv_and_the_rest_of_the_device(deployment: Deployment) -> None:
    text = render_explanation(planned(deployment))
    assert columns(text, "2 code2wav")["KV/token"] == "no KV"
    assert "device 1: total 80.00 GiB: budgets 56.00 GiB, reserve 2 x 2.00 GiB, unplanned 20.00 GiB" in text
    assert "context: assumed" in text
    assert "weights: forecast from the checkpoint" in text


def test_a_stage_without_a_forecast_says_why(deployment: Deployment) -> None:
    plan = planned(deployment, {0: NEEDS[0]}, s1="its engine needs data")
    text = render_explanation(plan)
    assert "stage talker: no forecast: its engine needs data" in text
    assert render_plan(plan).splitlines()[-1].startswith("verdict: fits, as far as is known (")
    assert columns(text, "1 talker")["budget"] == "-"


def test_a_budget_that_cannot_hold_the_forecast_is_a_finding_with_what_would_do(deployment: Deployment) -> None:
    heavy = StageNeed(NEEDS[2].weights_bytes, 20 * GIB, 0, None)
    error = refusal(planned(deployment, {2: heavy}))
    assert isinstance(error, NeverFitsError)
    assert "stage 2 (code2wav): by forecast the stage does not fit its budget (budget 8.00 GiB" in str(error)
    assert "utilization 0.2694" in str(error)


def test_auto_budgets_fill_the_device(deployment: Deployment) -> None:
    stages = [
        stage.model_copy(update={"utilization": None, "budget": "auto"}) if stage.id else stage
        for stage in deployment.stages
    ]
    plan = planned(deployment.model_copy(update={"stages": tuple(stages)}))
    assert refusal(plan) is None
    (device,) = [device for device in plan.devices if device.verdict.device == 1]
    assert device.left_bytes is not None
    assert 0 <= device.left_bytes < 2
    body = json.loads(json.dumps(plan_to_json(plan)))
    assert body["stages"][1]["forecast"]["terms"]["budget"]["source"] == "automatic budget"
    assert body["stages"][2]["forecast"]["num_blocks"] == 0
    assert body["stages"][1]["kv_bytes_per_token"] == 20_480
