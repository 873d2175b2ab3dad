"""Asking for needs: one stage's failure stops no other, and a process that hangs or dies costs only what it owed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.need import NeedRequest, Needs
from stagelaunch.supervisor.forecast import ask_needs, ask_needs_sync

TIMEOUT_S = 90.0
ENGINE = """
import os, signal, sys
import torch
from light_engine import LightEngine

class Engine(LightEngine):
    def import_libraries(self):
        print("noise on stdout", flush=True)
    def run_largest_batch(self):
        super().run_largest_batch()
        with self._device.compute():
            match self._spec.component:
                case "data":
                    int(self._weight.sum())
                case "exits":
                    sys.exit(3)
                case "dies":
                    print("last words", file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hangs":
                    signal.pause()
                case "environment":
                    assert os.environ["COLOUR"] == "blue" and os.environ["CUDA_VISIBLE_DEVICES"] == ""
                    assert torch.get_num_threads() == 1
                case _:
                    assert "COLOUR" not in os.environ
"""


def ask_async(requests: list[NeedRequest], timeout_s: float) -> Needs:
    return asyncio.run(ask_needs(requests, timeout_s))


both = pytest.mark.parametrize("ask", [ask_async, ask_needs_sync])


@pytest.fixture(autouse=True)
def _engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_engine.py").write_text(ENGINE)
    # Found by the path of this process alone, as a worker would find it.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(tmp_path))


def requests(*components: str) -> list[NeedRequest]:
    return [
        NeedRequest(stage_id, "odd_engine:Engine", spec(component, 8, 64, 64, 16, (8, 1)), colour(component))
        for stage_id, component in enumerate(components)
    ]


def spec(component: str, *limits: Any) -> EngineSpec:
    return EngineSpec(component, Path("/nowhere"), "auto", *limits)


def colour(component: str) -> dict[str, str]:
    return {"COLOUR": "blue"} if component == "environment" else {}


def children() -> list[str]:
    """Children of this process, zombies included."""
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def test_one_failure_stops_no_other() -> None:
    asked = requests("environment", "data", "exits", "plain")
    asked.append(NeedRequest(9, "no.such:Engine", spec("x", 1, 1, 1, 1, ())))
    needs = ask_needs_sync(asked, TIMEOUT_S)
    assert set(needs.found) == {0, 3}, needs.errors
    assert needs.found[0] == needs.found[3]
    assert needs.found[0].layout is not None
    assert needs.found[0].layout.bytes_per_token == 2048
    assert set(needs.errors) == {1, 2, 9}
    assert all(text.startswith("cannot forecast the stage: ") for text in needs.errors.values())
    assert "_local_scalar_dense" in needs.errors[1]
    assert "SystemExit: 3" in needs.errors[2]
    assert "cannot load engine 'no.such:Engine'" in needs.errors[9]
    assert children() == []


@both
def test_a_process_that_dies_costs_the_stage_it_died_of(ask) -> None:
    needs = ask(requests("plain", "dies", "plain"), TIMEOUT_S)
    assert set(needs.found) == {0, 2}
    assert set(needs.errors) == {1}
    assert "the asking process ended with SIGKILL: last words" in needs.errors[1]
    assert children() == []


@both
def test_a_process_that_hangs_costs_the_deadline(ask) -> None:
    begun_s = time.monotonic()
    needs = ask(requests("hangs"), 0.2)
    assert time.monotonic() - begun_s < 10
    assert set(needs.errors) == {0}
    assert "there was no answer within 0.20s" in needs.errors[0]
    assert children() == []


def test_asking_needs_no_torch(spawn) -> None:
    child = spawn("import sys, stagelaunch.supervisor.forecast; print('torch' in sys.modules)")
    assert child.communicate()[0].strip() == "False"
