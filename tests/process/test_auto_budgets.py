"""Budgets nobody writes: forecast without a device, kept to the block by the boot; and the published model's plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployments import ROOT, Site, light_stage

from stagelaunch.config_file import load_deployment
from stagelaunch.core.explain_text import render_explanation
from stagelaunch.core.need import Needs
from stagelaunch.core.plan import Plan, make_plan
from stagelaunch.core.plan_text import render_plan
from stagelaunch.core.units import GIB, MIB
from stagelaunch.supervisor.forecast import ask_needs_sync, forecasts_of, need_requests
from stagelaunch.weights.index import read_index
from stagelaunch.weights.synthetic import PUBLISHED_SHARDS, published_config, write_checkpoint


def booted(site: Site) -> dict[str, dict[str, Any]]:
    """The ledgers by stage name, of a boot that left nothing."""
    up = site.up("--detach", "--wait")
    assert up.code == 0, up.stderr
    status = json.loads(site.run("status", str(site.config), "--json").stdout)
    assert site.run("down", str(site.config)).code == 0
    site.assert_nothing_left(up)
    return {stage["name"]: stage["ledger"] for stage in status["stages"]}


def test_auto_stages_share_what_written_budgets_leave(tmp_path: Path) -> None:
    stages = [light_stage(0, "alpha", 1), light_stage(1, "beta", 1), light_stage(2, "gamma", 1)]
    for stage, weight in ((stages[0], 1), (stages[1], 3)):
        del stage["utilization"]
        stage |= {"budget": "auto", "kv_weight": weight}
    site = Site(tmp_path, stages)
    ledgers = booted(site)
    assert ledgers["alpha"]["terms"]["budget"]["source"] == "automatic budget"
    budgets = {name: ledger["terms"]["budget"]["bytes"] for name, ledger in ledgers.items()}
    assert budgets["gamma"] == int(0.4 * GIB)
    assert GIB - 3 * 16 * MIB - 2 <= sum(budgets.values()) <= GIB - 3 * 16 * MIB
    assert ledgers["beta"]["num_blocks"] == pytest.approx(3 * ledgers["alpha"]["num_blocks"], rel=0.01)


@pytest.mark.parametrize("command", ["plan", "up"])
def test_an_auto_stage_that_cannot_be_forecast_is_refused_before_anything_starts(tmp_path: Path, command: str) -> None:
    stage = light_stage(0, "alpha", 0, engine="no_such_module:Engine", budget="auto")
    del stage["utilization"]
    site = Site(tmp_path, [stage])
    ran = site.run(command, str(site.write()))
    assert ran.code == 78
    assert "stage alpha: cannot work out its budget: cannot forecast the stage: " in ran.stderr
    assert "No module named 'no_such_module'" in ran.stderr
    assert "(pid " not in ran.stderr


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "model"
    write_checkpoint(directory, config=published_config(), headers_only=True, num_shards=PUBLISHED_SHARDS)
    return directory


@pytest.fixture(scope="module")
def needs(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Needs:
    """Of the published model's stages, which both shipped configs for real cards have alike."""
    body = yaml.safe_load((ROOT / "configs" / "qwen3-omni-2xh100.yaml").read_text())
    config = tmp_path_factory.mktemp("config") / "config.yaml"
    config.write_text(yaml.safe_dump({**body, "model": str(published)}))
    found = ask_needs_sync(need_requests(load_deployment(config), auto_only=False), 100.0)
    assert found.errors == {}
    return found


def plan_of(name: str, published: Path, needs: Needs, totals: dict[int, int]) -> Plan:
    deployment = load_deployment(ROOT / "configs" / f"{name}.yaml").deployment
    sizes = read_index(published).component_bytes()
    weights = {stage.id: sizes[stage.component] for stage in deployment.stages}
    return make_plan(deployment, totals, weights, forecasts=forecasts_of(needs, None))


def test_the_published_model_on_two_cards_of_80_gib(published: Path, needs: Needs) -> None:
    plan = plan_of("qwen3-omni-2xh100", published, needs, {0: 80 * GIB, 1: 80 * GIB})
    text = render_plan(plan, render_explanation(plan))
    rows = {line.split()[2]: line.split() for line in text.partition("memory\n")[2].splitlines()[1:4]}
    assert [" ".join(rows[name][-2:]) for name in ("thinker", "talker", "code2wav")] == [
        "59.08 GiB", "6.19 GiB", "0.40 GiB",
    ]  # fmt: skip
    assert "98,304 B" in text
    assert "20,480 B" in text
    assert plan.fits
    thinker, talker, code2wav = (stage.forecast for stage in plan.stages)
    assert thinker is not None
    assert talker is not None
    assert code2wav is not None
    # The reference reckons 5,584 blocks with 4.0 GiB for context, activations, non-torch and graphs on 79.18 GiB.
    assert 4_000 < thinker.num_blocks < 6_000
    assert talker.num_blocks > 100_000
    assert code2wav.num_blocks == 0
    assert code2wav.activations.size_bytes > 5 * code2wav.weights.size_bytes


def test_the_published_model_on_one_card_of_141_gb(published: Path, needs: Needs) -> None:
    plan = plan_of("qwen3-omni-1x141gb", published, needs, {0: 140 * GIB})
    assert plan.fits
    thinker, talker, code2wav = (stage.forecast for stage in plan.stages)
    assert thinker is not None
    assert talker is not None
    assert code2wav is not None
    assert thinker.kv.size_bytes == pytest.approx(3 * talker.kv.size_bytes, rel=0.03)
    assert 0 <= plan.devices[0].left_bytes < 3
    assert not plan_of("qwen3-omni-1x141gb", published, needs, {0: 80 * GIB}).fits


def test_headers_without_data_are_refused_before_anything_starts(tmp_path: Path, published: Path) -> None:
    shipped = yaml.safe_load((ROOT / "configs" / "qwen3-omni-2xh100.yaml").read_text())
    site = Site(tmp_path, shipped["stages"], {"model": str(published)})
    ran = site.up()
    assert ran.code == 78
    assert "headers only" in ran.stderr
    assert "(pid " not in ran.stderr
