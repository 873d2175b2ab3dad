"""The main job: three Qwen3-Omni-shaped stages from a real checkpoint on disk, on two simulated devices."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from deployments import ROOT, Site


def test_three_real_stages_boot_answer_and_leave_nothing(
    tmp_path: Path, tiny_checkpoint: Path, request: pytest.FixtureRequest
) -> None:
    shipped = yaml.safe_load((ROOT / "configs" / "qwen3-omni-tiny.yaml").read_text())
    (tmp_path / "current").symlink_to(tiny_checkpoint)
    own = {
        "name": "site",
        "model": "current",
        "simulated": {**shipped["simulated"], "file": "devices"},
        "lock_dir": "locks",
        "runtime_dir": "run",
    }
    site = Site(tmp_path, shipped["stages"], {**shipped, **own})
    config = str(site.write())
    plan = json.loads(site.run("plan", config, "--explain", "--json").stdout)
    # Also where something below is not as it should be.
    request.addfinalizer(lambda: site.run("down", config, "--now"))
    up = site.run("up", config, "--detach", "--wait")
    assert up.code == 0, up.stderr

    stages = {stage["name"]: stage for stage in json.loads(site.run("status", config, "--json").stdout)["stages"]}
    blocks = {name: stage["ledger"]["num_blocks"] for name, stage in stages.items()}
    assert blocks["thinker"] > 1000
    assert blocks["talker"] > 1000
    assert blocks["code2wav"] == 0
    for stage in plan["stages"]:
        forecast, ledger = stage["forecast"], stages[stage["name"]]["ledger"]
        # Said before there was a process, kept to the byte and to the block.
        for term in ("budget", "context", "weights", "activations"):
            assert ledger["terms"][term]["bytes"] == forecast["terms"][term]["bytes"] > 0
        assert ledger["num_blocks"] == forecast["num_blocks"]

    log = site.run("logs", config, "talker").stdout.splitlines()
    assert (log[0].startswith("---- "), log[1].startswith("weights: ")) == (True, True)
    # Not by the link, which may lead to another version by the time a stage reads.
    assert f"read from {tiny_checkpoint.resolve()} (" in log[1]

    results = json.loads(site.run("probe", config, "--json").stdout)
    assert [(r["stage"], r["through_graph"], r["max_abs_diff"]) for r in results] == [
        (name, True, 0.0) for name in ("thinker", "talker", "code2wav")
    ]
    # What could not be loaded again is not ended, either.
    for shard in tiny_checkpoint.glob("*.safetensors"):
        os.utime(shard)
    refused = site.run("restart", config, "thinker")
    assert (refused.code, "changed since it was checked" in refused.stderr) == (1, True)
    assert site.run("status", config).code == 0
    assert site.run("down", config).code == 0
    site.assert_nothing_left(up)
