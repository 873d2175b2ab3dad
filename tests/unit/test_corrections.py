"""What a boot teaches the next one of the same plan."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.run_spec import StageRun
from stagelaunch.supervisor.corrections import plan_key, recall, remember

RUN = StageRun(
    "d", 3, "talker", "simulated", 1, "SIM-1", None, Path("/l"), 2.5, "e",
    EngineSpec("talker", Path("/c"), "auto", 1, 2, 3, 4, (8, 4), {"a": "b"}), 0.5, None, {"X": "1"},
    Path("/log"), "claim",
)  # fmt: skip
CORRECTED = replace(RUN, graphs_correction_bytes=7)


def test_the_same_plan_gets_it_back(tmp_path):
    remember(tmp_path / "c", (CORRECTED, replace(RUN, stage_id=4)))
    elsewhere = replace(RUN, log_path=Path("/other"), lock_timeout_s=9.0)
    assert recall(tmp_path / "c", (elsewhere,)) == ((replace(elsewhere, graphs_correction_bytes=7),), ())


@pytest.mark.parametrize(
    "change",
    [
        {"utilization": 0.6},
        {"spec": replace(RUN.spec, capture_sizes=(8,))},
        {"device_uuid": "SIM-2"},
        {"env": {}},
        {"stage_id": 4},
    ],
)
def test_another_plan_does_not(tmp_path, change):
    remember(tmp_path / "c", (CORRECTED,))
    other = replace(RUN, **change)
    assert plan_key(other) != plan_key(RUN)
    assert recall(tmp_path / "c", (other,)) == ((other,), ())


@pytest.mark.parametrize("text", ["", "[]", '{"x": "7"}', '{"x": -7}', '{"x": true}', "\udcff", "[" * 100_000])
def test_a_file_that_says_something_else_is_ignored_with_a_line(tmp_path, text):
    path = tmp_path / "c"
    path.write_text(text, errors="surrogateescape")
    runs, (remark,) = recall(path, (RUN,))
    assert runs == (RUN,)
    assert f"corrections of earlier boots in {path} are ignored" in remark


def test_no_file_is_nothing_to_say(tmp_path):
    assert recall(tmp_path / "c", (RUN,)) == ((RUN,), ())


def test_something_that_would_be_waited_for_is_ignored_as_well(tmp_path):
    os.mkfifo(tmp_path / "c")
    runs, (remark,) = recall(tmp_path / "c", (RUN,))
    assert (runs, "it is not a file" in remark) == ((RUN,), True)
