"""A stage process that boots again and again on command and stops at every edge until it is told to go on.

The worker's own code on a simulated device; what is the harness's is only where it stops. One JSON list a line, both
ways: it says ``edge PHASE NAME``, ``ready FIGURES``, ``failed TYPE TEXT`` and ``closed``; it is told ``go`` or, at an
edge, ``die``. Ends at end of file on its input. Started and scheduled by ``interleaving``.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from light_engine import LightEngine

from stagelaunch.core import ledger as ledger_rules
from stagelaunch.core import messages as m
from stagelaunch.core.ledger import Ledger, Term
from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.core.run_spec import StageRun, run_from_json
from stagelaunch.core.units import MIB
from stagelaunch.devices.base import Graph, MemoryStats
from stagelaunch.devices.simulated import SimulatedDevice
from stagelaunch.system import locks
from stagelaunch.worker import boot
from stagelaunch.worker.reporter import Reporter

UNKNOWN_PID = 4_194_305
"""Above what a kernel gives: what a stage in a container calls itself, and the driver does not know."""
WORKSPACE_BYTES = 6 * MIB
"""What a library takes by itself with the first batch: the stage's non-torch growth."""
SCRATCH_FLOATS = 3 << 20
MARGIN_BYTES = 4 * MIB


class Dies(BaseException):
    """The stage was told to die. Not an Exception, so that nothing on the way stops it."""


def say(*event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def heard() -> list[Any]:
    line = sys.stdin.readline()
    return json.loads(line) if line else ["end"]


def edge(name: str) -> None:
    say("edge", EdgeReporter.current, name)
    match heard():
        case ["go"]:
            return
        case ["die"]:
            raise Dies
        case _:
            sys.exit(0)


class EdgeReporter(Reporter):
    """Stops where a supervisor would hear of a phase or of a lock; not at progress, which is rationed by time."""

    current = Phase.IMPORT

    def __init__(self) -> None:
        pass

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        EdgeReporter.current = phase
        with super().phase(phase):
            yield

    def send(self, message: m.Message) -> None:
        match message:
            case m.PhaseBegan():
                edge("begins")
            case m.PhaseEnded():
                edge("ends")
            case m.LockTaken(_, mode):
                edge(f"{mode} lock taken")


class EdgeDevice(SimulatedDevice):
    """Stops before whatever reads or changes what all processes share. ``driver``: what it tells of processes."""

    def __init__(self, run: StageRun, driver: str) -> None:
        assert run.machine is not None
        super().__init__(run.machine, run.device_index)
        self._driver = driver

    def create_context(self) -> None:
        edge("create_context")
        super().create_context()

    def process_table(self) -> dict[int, int | None] | None:
        edge("process_table")
        table = super().process_table()
        match self._driver:
            case "silent":
                return None
            case "sizeless":
                return dict.fromkeys(table)
            case _:
                return dict(table)

    def free_bytes(self) -> int:
        edge("free_bytes")
        return super().free_bytes()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        edge("empty")
        return super().empty(shape, dtype)

    def empty_cache(self) -> None:
        edge("empty_cache")
        super().empty_cache()

    def capture(self, *arguments: Any) -> Graph:
        edge("capture")
        return super().capture(*arguments)

    def take_workspace(self) -> None:
        assert self._file.allocate(self._index, WORKSPACE_BYTES)


class EdgeEngine(LightEngine):
    """Takes memory in every way a stage does, without touching it: a boot costs milliseconds."""

    _workspace = False

    def read_weights(self, progress: Any) -> None:
        edge("read_weights")
        super().read_weights(progress)

    def run_largest_batch(self) -> None:
        if not self._workspace:
            self._workspace = True
            edge("workspace")
            self._device.take_workspace()
        with self._device.compute():
            scratch = torch.empty(SCRATCH_FLOATS)
            edge("batch at its peak")
            del scratch

    def allocate_kv(self, num_blocks: int) -> None:
        edge("allocate_kv")
        super().allocate_kv(num_blocks)

    def _step(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.empty(len(hidden) << 18)
        return (hidden + 1,)


class EdgeLocks(locks.DeviceLocks):
    """The real lock; stops before each further try while it waits, and when it has let go. None in some phases."""

    def __init__(self, run: StageRun, unlocked: Collection[str]) -> None:
        self._asked = 0
        self._unlocked = unlocked
        super().__init__(
            locks.LockDirectory(run.lock_dir), [run.device_uuid], owner=run.name, clock=self._stop_before_a_try
        )

    def _stop_before_a_try(self) -> float:
        """The clock of a request: read once for its deadline, then before each further try. Stands still."""
        self._asked += 1
        if self._asked > 1:
            edge("lock awaited")
        return 0.0

    @contextmanager
    def hold(self, mode: LockMode, *, phase: str, **more: Any) -> Iterator[None]:
        self._asked = 0
        with super().hold(LockMode.NONE if phase in self._unlocked else mode, phase=phase, **more):
            yield
        edge("lock released")


class DeviceWideBoot(boot.Boot):
    """Sizes as engines do today: whatever is used on the device is taken for the stage's own."""

    def _profile(self) -> tuple[Term, Term, Term, Term]:
        weights, activations, non_torch, graphs = super()._profile()
        used_bytes = self._device.total_bytes() - self._device.free_bytes()
        own_bytes = self._memory._context_bytes + non_torch.size_bytes
        return replace(weights, size_bytes=used_bytes - own_bytes), activations, non_torch, graphs


def figures(ledger: Ledger, memory: MemoryStats) -> dict[str, Any]:
    return {
        "blocks": ledger.num_blocks,
        "sizes": {name: term.size_bytes for name, term in ledger.rows()} | {"estimate": ledger.graphs_estimate_bytes},
        "kv_given": ledger.kv.other_bytes,
        "held": ledger.held_bytes,
        "sources": {name: term.source for name, term in ledger.rows()},
        "reserved": memory.reserved_bytes,
    }


def boot_once(run: StageRun, driver: str, unlocked: Collection[str], sizing: str) -> None:
    boot.own_pids = (lambda: (UNKNOWN_PID,)) if driver == "renumbered" else OWN_PIDS
    device = EdgeDevice(run, driver)
    engine = EdgeEngine(run.spec)
    kind = DeviceWideBoot if sizing == "device-wide" else boot.Boot
    try:
        ledger = kind(run, engine, device, EdgeLocks(run, unlocked), EdgeReporter()).walk()
        say("ready", figures(ledger, device.memory()))
    except (Exception, Dies) as error:
        # What a process that dies has is back only after its locks are free: until it is told to go on, it is there.
        say("failed", type(error).__name__, str(error))
    heard()
    device.close()
    say("closed")


def settle_for_good() -> None:
    """What imports and the first boot leave is there for good: no later collection looks at it again."""
    gc.collect()
    gc.freeze()


def main() -> None:
    # Polling is paced by the schedule; capacity is worth little as a check while each stage leaves 150 MiB of it.
    locks._PAUSE_FIRST_S = locks._PAUSE_MAX_S = 0.0
    ledger_rules._MARGIN_BYTES = MARGIN_BYTES
    settle_for_good()
    say("up")
    first = True
    while (order := heard()) != ["end"]:
        run_text, stage_id, driver, unlocked, sizing = order
        boot_once(run_from_json(run_text, stage_id), driver, unlocked, sizing)
        if first:
            settle_for_good()
            first = False


OWN_PIDS = boot.own_pids

if __name__ == "__main__":
    main()
