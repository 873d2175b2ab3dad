"""``up --reuse-plan`` in real processes: what an earlier boot measured is used, and not believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deployments import Site, in_full_only, light_stage

from stagelaunch.core.ledger import Source
from stagelaunch.core.units import MIB
from stagelaunch.supervisor.remembered import _checksum


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, [light_stage(0, "alpha", 0)])


def boot(site: Site, *options: str) -> tuple[dict[str, Any], str]:
    """The ledger of the one stage, and what was said."""
    ran = site.up("--detach", "--wait", *options)
    assert ran.code == 0, ran.stderr
    body = json.loads(site.run("status", str(site.config), "--json").stdout)
    assert site.run("down", str(site.config)).code == 0
    site.assert_nothing_left(ran)
    ledger: dict[str, Any] = body["stages"][0]["ledger"]
    return ledger, ran.stderr


def remembered(site: Site) -> Path:
    return site.directory / "run" / "site" / "remembered.json"


def test_the_next_boot_of_the_same_plan_gets_the_same_blocks_by_it(site: Site) -> None:
    measured, _ = boot(site)
    kept = remembered(site).read_text()
    again, said = boot(site, "--reuse-plan")
    assert "boots by what an earlier boot has measured: alpha" in said
    assert "once more" not in said
    assert (again["num_blocks"], again["held_bytes"]) == (measured["num_blocks"], measured["held_bytes"])
    sources = {name: term["source"] for name, term in again["terms"].items()}
    assert {sources[name] for name in ("context", "weights", "activations", "non_torch")} == {Source.REMEMBERED}
    assert sources["graphs"] == Source.MEASURED
    assert remembered(site).read_text() == kept


@in_full_only
def test_a_lie_is_found_after_capture_and_the_stage_is_started_again_and_measured(site: Site) -> None:
    measured, _ = boot(site)
    body = json.loads(remembered(site).read_text())
    ledger = body["stages"]["alpha"]["ledger"]
    # Of a boot that could be: the weights take more, and so much less is left for the KV cache.
    taken = 100 * MIB // ledger["block_bytes"] * ledger["block_bytes"]
    for term, by_bytes in (("weights", taken), ("kv", -taken)):
        ledger[term]["size_bytes"] += by_bytes
    ledger["num_blocks"] -= taken // ledger["block_bytes"]
    remembered(site).write_text(json.dumps(body | {"checksum": _checksum(body["stages"])}))
    again, said = boot(site, "--reuse-plan")
    assert "failed in capture: cannot boot by its remembered plan: weights, libraries and graphs take" in said
    assert said.count("is started once more in a fresh process, and measures") == 1
    assert again["num_blocks"] == measured["num_blocks"]
    assert again["terms"]["weights"]["source"] == Source.ALLOCATOR
    assert json.loads(remembered(site).read_text())["stages"]["alpha"]["ledger"]["num_blocks"] == again["num_blocks"]
