"""A stage's boot on a simulated device: measured, and by what a measured one has left."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stagelaunch.core import messages as m
from stagelaunch.core.config import Stage
from stagelaunch.core.engine_spec import spec_of
from stagelaunch.core.errors import RememberedPlanError
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.ledger import KVLayout, Ledger, Source
from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.core.remembered import Remembered, flaw
from stagelaunch.core.run_spec import StageRun
from stagelaunch.core.units import GIB, MIB
from stagelaunch.devices.simulated import SimulatedDevice
from stagelaunch.system.locks import DeviceLocks, LockDirectory
from stagelaunch.worker.boot import Boot
from stagelaunch.worker.measure import TRIAL_CAPTURES
from stagelaunch.worker.reporter import Reporter

torch.set_num_threads(1)
STAGE = {"id": 0, "name": "a", "component": "talker", "devices": [0], "utilization": 0.5, "max_num_batched_tokens": 64}


@dataclass
class SmallEngine:
    """Takes memory in every way a stage does; what it was asked for, in order, is in ``asked``."""

    weights_mib: int = 40
    batch_mib: int = 60
    first_batch_mib: int = 60
    graph_mib: int = 10
    workspace_mib: int = 4
    first_capture_keeps_mib: int = 0
    has_kv: bool = True
    asked: list[Any] = field(default_factory=list)
    collecting: list[bool] = field(default_factory=list)
    """Whether garbage was being collected, at each capture."""

    def import_libraries(self) -> None: ...

    def allocate_weights(self, device: SimulatedDevice) -> None:
        self.device = device
        self.weights = self._take(self.weights_mib)
        self.graphs: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []

    def _take(self, mib: int) -> torch.Tensor:
        return self.device.empty((mib * MIB,), torch.uint8)

    def read_weights(self, progress: Any) -> None: ...

    def run_largest_batch(self) -> None:
        first = "batch" not in self.asked
        self.asked.append("batch")
        if first:
            assert self.device._file.allocate(self.device._index, self.workspace_mib * MIB)
        with self.device.compute():
            torch.empty((self.first_batch_mib if first else self.batch_mib) * MIB, dtype=torch.uint8)

    @property
    def kv_layout(self) -> KVLayout | None:
        return KVLayout(2, 2, 64, 4, 16) if self.has_kv else None

    def allocate_kv(self, num_blocks: int) -> None:
        self.asked.append("kv")
        self.kv = self.device.empty((num_blocks, self.kv_layout.block_bytes), torch.uint8)

    def release_kv(self) -> None:
        self.kv = None

    def capture(self, size: int) -> None:
        self.asked.append(size)
        self.collecting.append(gc.isenabled())
        if not self.kept:
            self.kept.append(self._take(self.first_capture_keeps_mib))
        self.graphs.append(self._take(self.graph_mib))

    def release_graphs(self) -> None:
        self.graphs.clear()


class Told(Reporter):
    def __init__(self) -> None:
        self.messages: list[m.Message] = []
        self._waited_s = self._progress_at_s = 0.0
        self.current = Phase.IMPORT

    def send(self, message: m.Message) -> None:
        self.messages.append(message)

    def locks_of(self, phase: Phase) -> list[LockMode]:
        return [
            message.mode for message in self.messages if isinstance(message, m.LockTaken) and message.phase is phase
        ]


@dataclass
class Booted:
    ledger: Ledger
    engine: SmallEngine
    told: Told


@dataclass
class Bench:
    directory: Path
    run: StageRun
    untold: bool = False
    """The driver tells nothing of processes."""

    @contextmanager
    def walking(self, plan: Ledger | None, engine: SmallEngine):
        assert self.run.machine is not None
        device = SimulatedDevice(self.run.machine, 0)
        if self.untold:
            device.process_table = lambda: None  # type: ignore[method-assign]
        locks = DeviceLocks(LockDirectory(self.directory / "locks"), [self.run.device_uuid], owner="a")
        told = Told()
        run = replace(self.run, remembered=plan, reuse_plan=plan is not None)
        try:
            yield Boot(run, engine, device, locks, told), told
        finally:
            device.close()

    def boot(self, plan: Ledger | None = None, **engine: Any) -> Booted:
        made = SmallEngine(**engine)
        with self.walking(plan, made) as (boot, told):
            return Booted(boot.walk(), made, told)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    machine = SimulatedMachine(tmp_path / "devices", {0: 1024 * MIB}, 32 * MIB)
    spec = spec_of(Stage.model_validate({**STAGE, "max_num_seqs": 12, "max_model_len": 64}), tmp_path)
    run = StageRun(
        "d", 0, "a", "simulated", 0, machine.uuid(0), machine, tmp_path / "locks", 5.0, "e", spec, 0.5, None, {},
        tmp_path / "log", "claim",
    )  # fmt: skip
    return Bench(tmp_path, run)


@pytest.fixture(autouse=True)
def frozen():
    # As a worker does after its imports: collections take a hundredth of the time.
    gc.freeze()
    yield
    gc.unfreeze()


SIZES = [12, 8, 4, 2, 1]


def test_every_size_is_captured_largest_first_while_nothing_is_collected(bench: Bench) -> None:
    frozen = gc.get_freeze_count()
    booted = bench.boot()
    assert booted.engine.asked == ["batch", "batch", "kv", *SIZES[:TRIAL_CAPTURES], "kv", *SIZES]
    assert booted.engine.collecting == [False] * (TRIAL_CAPTURES + len(SIZES))
    assert gc.isenabled()
    # What was loaded is left alone by every later collection.
    assert gc.get_freeze_count() > frozen


def test_a_boot_by_a_plan_gives_the_same_blocks_without_measuring_again(bench: Bench) -> None:
    first = bench.boot()
    second = bench.boot(first.ledger)
    assert second.engine.asked == ["batch", "kv", *SIZES]
    assert second.ledger.num_blocks == first.ledger.num_blocks > 0
    assert second.ledger.held_bytes == first.ledger.held_bytes
    assert first.told.locks_of(Phase.PROFILE) == ["shared", "exclusive"]
    assert second.told.locks_of(Phase.PROFILE) == ["shared"]
    for name in ("context", "weights", "activations", "non_torch"):
        term, before = getattr(second.ledger, name), getattr(first.ledger, name)
        assert (term.size_bytes, term.source, term.other_bytes) == (
            before.size_bytes,
            Source.REMEMBERED,
            before.size_bytes,
        )
    assert second.ledger.graphs == replace(first.ledger.graphs, source=Source.MEASURED)


@pytest.mark.parametrize("change", [{"has_kv": False}, {"first_capture_keeps_mib": 48}, {"first_batch_mib": 200}])
def test_it_holds_for_a_stage_of_its_own_ways(bench: Bench, change: dict[str, Any]) -> None:
    first = bench.boot(**change)
    second = bench.boot(first.ledger, **change)
    assert second.ledger.num_blocks == first.ledger.num_blocks
    assert second.ledger.weights.source is Source.REMEMBERED
    # Only a first batch that took more is run once more.
    assert second.engine.asked.count("batch") == (2 if "first_batch_mib" in change else 1)


def test_a_driver_that_tells_nothing_leaves_one_exclusive_window(bench: Bench) -> None:
    bench.untold = True
    first = bench.boot()
    second = bench.boot(first.ledger)
    assert second.ledger.num_blocks == first.ledger.num_blocks
    assert second.ledger.non_torch.other_bytes == first.ledger.non_torch.size_bytes == 4 * MIB
    assert second.told.locks_of(Phase.PROFILE) == ["exclusive"]


@pytest.mark.parametrize(
    ("change", "phase", "kv_was_allocated"),
    [
        ({"weights_mib": 90}, Phase.PROFILE, False),
        ({"batch_mib": 120, "first_batch_mib": 120}, Phase.PROFILE, False),
        ({"batch_mib": 1, "first_batch_mib": 1}, Phase.PROFILE, False),
        ({"workspace_mib": 50}, Phase.PROFILE, False),
        ({"weights_mib": 2}, Phase.CAPTURE, True),
        ({"graph_mib": 20}, Phase.CAPTURE, True),
        ({"graph_mib": 2}, Phase.CAPTURE, True),
    ],
)
def test_a_plan_that_does_not_hold_is_found_and_worth_a_fresh_process(
    bench: Bench, change: dict[str, Any], phase: Phase, kv_was_allocated: bool
) -> None:
    plan = bench.boot().ledger
    engine = SmallEngine(**change)
    with bench.walking(plan, engine) as (boot, told):
        with pytest.raises(RememberedPlanError, match=r"cannot boot by its remembered plan: .*, and it was"):
            boot.walk()
        assert told.current is phase
    assert ("kv" in engine.asked) is kv_was_allocated
    assert RememberedPlanError.retry


def test_a_plan_whose_kv_cache_holds_no_request_is_refused_before_it_is_allocated(bench: Bench) -> None:
    bench.untold = True
    plan = bench.boot().ledger
    # Nothing that is read later could tell: the estimate is what the KV cache was sized by, and is gone by then.
    lie = replace(plan, graphs_estimate_bytes=GIB, num_blocks=0, kv=replace(plan.kv, size_bytes=0))
    assert flaw(Remembered({}, 0, lie)) is None
    engine = SmallEngine()
    with (
        bench.walking(lie, engine) as (boot, _),
        pytest.raises(RememberedPlanError, match="the stage does not fit its budget"),
    ):
        boot.walk()
    assert "kv" not in engine.asked


def test_a_stranger_s_memory_makes_it_measure_at_once(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    plan = bench.boot().ledger
    device = SimulatedDevice(bench.run.machine, 0)
    device._file.set_foreign_bytes(0, 750 * MIB)
    device.close()
    engine = SmallEngine()
    with bench.walking(plan, engine) as (boot, _), pytest.raises(Exception, match="the device is out of memory"):
        boot.walk()
    assert engine.asked.count("batch") == 2
    assert "measures, although its plan is remembered: it will take" in capsys.readouterr().out


def test_another_budget_is_measured_at_once(bench: Bench) -> None:
    plan = bench.boot().ledger
    bench.run = replace(bench.run, utilization=0.6)
    booted = bench.boot(plan)
    assert booted.ledger.num_blocks > plan.num_blocks
    assert booted.ledger.weights.source is Source.ALLOCATOR
