"""Which step of a boot runs under which device lock: what DESIGN marks exclusive, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from stagelaunch.core import messages as m
from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.ledger import KVLayout
from stagelaunch.core.phases import STEPS, LockMode, Phase
from stagelaunch.core.run_spec import StageRun
from stagelaunch.core.units import MIB
from stagelaunch.devices.simulated import SimulatedDevice
from stagelaunch.system.locks import DeviceLocks
from stagelaunch.worker.boot import Boot
from stagelaunch.worker.reporter import Reporter

SIZES = (4, 2, 1)


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here leaves garbage; looking for it again and again costs seconds."""
    monkeypatch.setattr("gc.collect", lambda: 0)


class Recorder:
    """Stands for the locks, the engine and the reporter: notes who was called under which lock."""

    def __init__(self) -> None:
        self.held = LockMode.NONE
        self.calls: list[tuple[str, LockMode]] = []
        self.kv_layout = KVLayout(1, 1, 16, 4, 16)

    @contextmanager
    def hold(self, mode: LockMode, **_: Any) -> Iterator[None]:
        assert self.held is LockMode.NONE
        self.held = mode
        yield
        self.held = LockMode.NONE

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append((name, self.held))


def walk(path: Path, *, told: bool) -> tuple[list[tuple[str, LockMode]], list[m.Message]]:
    """A boot with an engine that takes nothing, on a device that tells this process's memory or does not."""
    device = SimulatedDevice(SimulatedMachine(path / "devices", {0: 1 << 30}, 8 * MIB), 0)
    spec = EngineSpec("alpha", path, "float32", 4, 64, 64, 16, SIZES, {})
    run = StageRun(
        "site",
        0,
        "alpha",
        "simulated",
        0,
        device.uuid,
        None,
        path,
        1.0,
        "none",
        spec,
        None,
        500 * MIB,
        {},
        path,
        "none",
    )
    recorder, (near, far) = Recorder(), socket.socketpair()
    empty_cache = device.empty_cache

    def noted_empty_cache() -> None:
        recorder.calls.append(("empty_cache", recorder.held))
        empty_cache()

    device.empty_cache = noted_empty_cache  # type: ignore[method-assign]
    if not told:
        device.process_table = lambda: None  # type: ignore[method-assign]
    try:
        Boot(run, cast(Any, recorder), device, cast(DeviceLocks, recorder), Reporter(near)).walk()
        near.close()
        with far.makefile("rb") as lines:
            return recorder.calls, [m.decode(line) for line in lines]
    finally:
        far.close()
        device.close()


NONE, SHARED, EXCLUSIVE = LockMode


@pytest.mark.parametrize(("told", "warm_up"), [(True, SHARED), (False, EXCLUSIVE)])
def test_each_step_runs_under_its_own_lock(tmp_path: Path, told: bool, warm_up: LockMode) -> None:
    calls, _ = walk(tmp_path, told=told)
    assert [call for call in calls if call[0] != "empty_cache"] == [
        ("allocate_weights", SHARED),
        ("read_weights", NONE),
        # Compiling and tuning disturb nobody, unless what they take can be seen on the whole device only.
        ("run_largest_batch", warm_up),
        ("run_largest_batch", EXCLUSIVE),
        ("allocate_kv", EXCLUSIVE),
        *[("capture", EXCLUSIVE)] * len(SIZES),
        ("release_graphs", EXCLUSIVE),
        ("release_kv", EXCLUSIVE),
        ("allocate_kv", EXCLUSIVE),
        *[("capture", SHARED)] * len(SIZES),
    ]
    assert ("empty_cache", NONE) not in calls


def test_a_lock_is_told_as_released_and_given_up_between_two_graphs(tmp_path: Path) -> None:
    _, said = walk(tmp_path, told=True)
    taken = [(word.phase, word.mode) for word in said if isinstance(word, m.LockTaken)]
    assert [(word.phase, word.mode) for word in said if isinstance(word, m.LockReleased)] == taken
    assert taken.count((Phase.CAPTURE, SHARED)) == len(SIZES)
    assert set(taken) == {(step.phase, step.lock) for step in STEPS if step.lock is not NONE}
