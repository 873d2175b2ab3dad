"""Boots three stages in every order of their steps: real worker processes, one step at a time, chosen by dice.

Each worker (``interleaved_worker``) stops at every edge: where a phase begins or ends, where a lock is taken, awaited
or released, before whatever reads or changes a device. The scheduler here picks who goes on to its next edge, so an
interleaving is a function of its seed. Neighbours act between two steps. Used by ``test_interleavings`` and by
``scripts/soak interleavings``, whose command line is at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.run_spec import StageRun, runs_to_json
from stagelaunch.core.units import MIB
from stagelaunch.devices.simfile import SimulatedFile

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ANSWER_S = 90.0
"""Far above anything a step needs; only a hang reaches it."""
CONTEXT_BYTES = 40 * MIB
ROOM_FOR_STRANGERS = 320 * MIB
NOTICEABLE_BYTES = 96 * MIB
"""More than a context and the slack of the measurement: what a stranger that must be noticed takes or gives at once."""
CHANCE = {"none": 0.0, "any": 0.05, "giver": 0.015, "comer": 0.03, "mortal": 0.01}
MAX_DEATHS = 2


class State(StrEnum):
    IDLE = "idle"
    PAUSED = "paused"
    WAITING = "waiting"
    READY = "ready"
    DYING = "dying"
    GONE = "gone"


@dataclass(frozen=True)
class Stage:
    name: str
    budget_bytes: int
    weights_mib: int
    capture_sizes: tuple[int, ...]


STAGES = (
    Stage("alpha", 180 * MIB, 2, (8, 4, 2, 1)),
    Stage("beta", 160 * MIB, 3, (4, 2, 1)),
    Stage("gamma", 140 * MIB, 1, (6, 3)),
)
PLACES = {"apart": (0, 1, 1), "together": (0, 0, 0)}
"""The device of each stage. Their budgets fill each device to the last byte."""


@dataclass(frozen=True)
class Campaign:
    """What stays the same over many interleavings.

    ``driver`` tells each process its memory (``telling``), nothing (``silent``), who is there but not with how much
    (``sizeless``), or knows the stages under pids that they do not know (``renumbered``). ``neighbours``: ``any`` is a
    process that comes, grows, shrinks, leaves and is killed; a ``giver`` was there before and only gives back; a
    ``comer`` changes who is there, and stays for longer than somebody looks; ``mortal`` stages are killed and boot
    again. For tests of the test: no lock is taken in the ``unlocked`` phases, and ``device-wide`` sizing is what
    engines do today.
    """

    driver: str
    neighbours: str = "none"
    unlocked: tuple[str, ...] = ()
    sizing: str = "own"

    def __str__(self) -> str:
        return f"{self.driver}/{self.neighbours}"

    @property
    def may_refuse(self) -> bool:
        """A stage may say that it was disturbed: only where others move and its own figure may not be known."""
        return self.neighbours != "none" and self.driver != "telling"


CAMPAIGNS = (
    Campaign("telling"),
    Campaign("silent"),
    Campaign("sizeless"),
    Campaign("renumbered"),
    Campaign("telling", "any"),
    Campaign("renumbered", "any"),
    Campaign("silent", "giver"),
    Campaign("sizeless", "comer"),
    Campaign("telling", "mortal"),
    Campaign("renumbered", "mortal"),
    Campaign("silent", "mortal"),
)


@dataclass
class Report:
    """One interleaving: who took which step, what every stage came to, and what is wrong with that."""

    seed: int
    trace: list[tuple[str, str]] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each stage that got ready."""
    refused: list[str] = field(default_factory=list)
    """Stages that said they were disturbed."""
    faults: list[str] = field(default_factory=list)
    acted_at: set[str] = field(default_factory=set)
    """Edges at which a stage stood when a neighbour acted."""


class Child:
    """A process that answers every line with a line."""

    def __init__(self, script: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._tell, self._hear = self.process.stdin, self.process.stdout

    def heard(self) -> list[Any]:
        assert select.select([self._hear], [], [], ANSWER_S)[0], f"{self.process.args} does not answer"
        line = self._hear.readline()
        assert line, f"{self.process.args} died: {self.process.wait()}"
        answer: list[Any] = json.loads(line)
        return answer

    def asked(self, *order: Any) -> list[Any]:
        self._tell.write(json.dumps(order).encode() + b"\n")
        self._tell.flush()
        return self.heard()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._tell.close()
        self._hear.close()


class Worker:
    """One stage over many boots: where its process stands."""

    def __init__(self, stage_id: int, child: Child) -> None:
        self.stage_id, self.stage, self.child = stage_id, STAGES[stage_id], child
        self.state = State.GONE
        self.order: tuple[Any, ...] = ()
        self.at = ""
        """The edge it reached last."""
        self.tried_at = 0
        """How often a lock had been released when it last tried for one."""

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def looks(self) -> bool:
        """Whether it is reading who is on the device and what is free."""
        return self.at.endswith(("process_table", "free_bytes"))

    def step(self, word: str = "go") -> list[Any]:
        """Let it run to its next edge; what it says there."""
        order = self.order if self.state is State.IDLE else (word,)
        said = self.child.asked(*order)
        match said:
            case ["edge", phase, name]:
                self.state = State.WAITING if name == "lock awaited" else State.PAUSED
                self.at = f"{phase}: {name}"
            case ["ready", _]:
                self.state, self.at = State.READY, "ready"
            case ["failed", *_]:
                self.state, self.at = State.DYING, "dying"
            case ["closed"]:
                self.state, self.at = State.GONE, "gone"
        return said


class Bench:
    """The processes of all campaigns, started once, and the directory of their locks and devices."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        children = [Child("interleaved_worker.py") for _ in STAGES]
        self.strangers = Child("strangers.py")
        self.workers = [Worker(stage_id, child) for stage_id, child in enumerate(children)]
        self._alone: dict[tuple[str, str, int], dict[str, Any]] = {}
        self._files: dict[Path, SimulatedFile] = {}
        for child in (*children, self.strangers):
            child.heard()

    def close(self) -> None:
        for child in (*(worker.child for worker in self.workers), self.strangers):
            child.close()
        for file in self._files.values():
            file.close()

    def file(self, machine: SimulatedMachine) -> SimulatedFile:
        """The file of a machine, opened once."""
        if machine.path not in self._files:
            self._files[machine.path] = SimulatedFile.open(machine)
        return self._files[machine.path]

    def machine(self, campaign: Campaign, place: str) -> SimulatedMachine:
        """Devices that the stages' budgets fill; with room for strangers where there are any."""
        crowded = campaign.neighbours in ("any", "giver", "comer")
        totals = dict.fromkeys(PLACES[place], ROOM_FOR_STRANGERS if crowded else 0)
        for stage, index in zip(STAGES, PLACES[place]):
            totals[index] += stage.budget_bytes
        name = f"{place}-{'crowded' if crowded else 'quiet'}"
        return SimulatedMachine(self.directory / name, totals, CONTEXT_BYTES)

    def order(self, campaign: Campaign, machine: SimulatedMachine, place: str, stage_id: int) -> tuple[Any, ...]:
        """What a worker is told to boot."""
        stage, index = STAGES[stage_id], PLACES[place][stage_id]
        run = StageRun(
            deployment="soak",
            stage_id=stage_id,
            name=stage.name,
            backend="simulated",
            device_index=index,
            device_uuid=machine.uuid(index),
            machine=machine,
            lock_dir=self.directory / "locks",
            lock_timeout_s=3600.0,
            engine="light_engine:LightEngine",
            spec=EngineSpec(
                component=stage.name,
                model_dir=self.directory,
                dtype="float32",
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_model_len=64,
                block_size=16,
                capture_sizes=stage.capture_sizes,
                options={"weights_mib": str(stage.weights_mib)},
            ),
            utilization=None,
            budget_bytes=stage.budget_bytes,
            env={},
            log_path=self.directory / "log",
            claim_id="none",
        )
        return runs_to_json((run,)), stage_id, campaign.driver, campaign.unlocked, campaign.sizing

    def alone(self, campaign: Campaign, stage_id: int) -> dict[str, Any]:
        """The figures of a stage that boots alone, with the same driver and sizing."""
        key = campaign.driver, campaign.sizing, stage_id
        if key not in self._alone:
            quiet = Campaign(campaign.driver, sizing=campaign.sizing)
            report = Interleaving(self, quiet, 0, "apart", (stage_id,)).finished()
            assert report.faults == [], report.faults
            self._alone[key] = report.figures[STAGES[stage_id].name]
        return self._alone[key]

    def run(self, campaign: Campaign, seed: int) -> Report:
        """One interleaving, compared with each stage booted alone."""
        place = random.Random(seed).choice(sorted(PLACES))
        expected = [self.alone(campaign, stage_id) for stage_id in range(len(STAGES))]
        report = Interleaving(self, campaign, seed, place, range(len(STAGES))).finished()
        for stage, alone in zip(STAGES, expected):
            for name in ("blocks", "sizes"):
                got = report.figures.get(stage.name, alone)[name]
                if got != alone[name]:
                    report.faults.append(f"{stage.name} has {name} {got}, alone {alone[name]}")
        return report


class Interleaving:
    """One boot of some stages, from nothing on the devices to nothing again. ``finished`` is called once."""

    def __init__(self, bench: Bench, campaign: Campaign, seed: int, place: str, stage_ids: Sequence[int]) -> None:
        self._bench, self._campaign, self._place = bench, campaign, place
        self._machine = machine = bench.machine(campaign, place)
        self._dice = random.Random(f"{seed} steps")
        self._workers = [bench.workers[stage_id] for stage_id in stage_ids]
        self._speeds = {worker.stage_id: self._dice.choice((1, 1, 3, 10)) for worker in self._workers}
        self._file = bench.file(machine)
        self._report = Report(seed)
        self._releases = self._deaths = 0
        self._stranger_bytes: int | None = None
        self._looking: set[str] = set()
        """Who was looking at a device when the stranger came, and still is."""
        self._stranger_device = self._dice.choice(sorted(set(PLACES[place])))

    def finished(self) -> Report:
        """Boot everything, look at what it came to, take it down."""
        for worker in self._workers:
            assert worker.state is State.GONE
            worker.state, worker.at = State.IDLE, "gone"
            worker.order = self._bench.order(self._campaign, self._machine, self._place, worker.stage_id)
        if self._campaign.neighbours == "giver":
            self._arrive(ROOM_FOR_STRANGERS)
        while (runnable := self._runnable()) or self._unfinished():
            if not runnable:
                self._report.faults.append("nobody can go on: every stage waits for a lock")
                self._end_waiters()
            elif self._dice.random() < CHANCE[self._campaign.neighbours]:
                self._neighbour_acts(runnable)
            else:
                speeds = [self._speeds[worker.stage_id] for worker in runnable]
                self._step(self._dice.choices(runnable, speeds)[0])
        self._check_bytes()
        self._take_down()
        return self._report

    def _unfinished(self) -> bool:
        return any(worker.state not in (State.READY, State.GONE) for worker in self._workers)

    def _runnable(self) -> list[Worker]:
        """Everyone who has a step to take. A try for a lock that nobody has released since the last is none."""
        return [
            worker
            for worker in self._workers
            if worker.state in (State.IDLE, State.PAUSED, State.DYING)
            or (worker.state is State.WAITING and worker.tried_at < self._releases)
        ]

    def _step(self, worker: Worker, word: str = "go") -> None:
        said = worker.step(word)
        if not worker.looks:
            self._looking.discard(worker.name)
        self._report.trace.append((worker.name, worker.at))
        match said:
            case ["edge", _, "lock awaited"]:
                worker.tried_at = self._releases
            case ["edge", _, "lock released"]:
                self._releases += 1
            case ["ready", figures]:
                self._report.figures[worker.name] = figures
            case ["failed", "Dies", _]:
                self._releases += 1
            case ["failed", kind, text]:
                self._releases += 1
                self._failed(worker, kind, text)
            case ["closed"] if worker.name not in self._report.refused and not self._gave_up(worker):
                worker.state = State.IDLE
        self._check_capacity(PLACES[self._place][worker.stage_id])

    def _failed(self, worker: Worker, kind: str, text: str) -> None:
        if kind == "DisturbedError" and self._campaign.may_refuse:
            self._report.refused.append(worker.name)
        else:
            self._report.faults.append(f"{worker.name} failed: {kind}: {text}")

    def _gave_up(self, worker: Worker) -> bool:
        return any(fault.startswith(f"{worker.name} failed") for fault in self._report.faults)

    def _end_waiters(self) -> None:
        for worker in self._workers:
            if worker.state is State.WAITING:
                self._report.faults.append(f"{worker.name} failed: it was ended while it waited")
                self._step(worker, "die")

    # What neighbours do.

    def _neighbour_acts(self, runnable: list[Worker]) -> None:
        if self._campaign.neighbours == "mortal":
            self._kill_a_stage(runnable)
        elif self._stranger_bytes is None:
            if self._campaign.neighbours != "giver":
                self._arrive(self._size(ROOM_FOR_STRANGERS))
        else:
            self._stranger_acts(self._stranger_bytes)

    def _kill_a_stage(self, runnable: list[Worker]) -> None:
        mortal = [worker for worker in runnable if worker.state in (State.PAUSED, State.WAITING)]
        if mortal and self._deaths < MAX_DEATHS:
            self._deaths += 1
            self._report.acted_at.update(worker.at for worker in self._workers)
            victim = self._dice.choice(mortal)
            self._report.trace.append((victim.name, "is killed"))
            self._step(victim, "die")

    def _arrive(self, size_bytes: int) -> None:
        self._stranger_device = self._dice.choice(sorted(set(PLACES[self._place])))
        self._tell_stranger(
            "arrive",
            str(self._machine.path),
            dict(self._machine.total_bytes),
            self._machine.context_bytes,
            self._stranger_device,
            size_bytes,
        )
        self._stranger_bytes = size_bytes
        self._looking = {worker.name for worker in self._workers if worker.looks}

    def _stranger_acts(self, held_bytes: int) -> None:
        least = 1 if self._campaign.neighbours == "any" else NOTICEABLE_BYTES
        choices = [] if self._campaign.neighbours == "comer" and self._looking else ["leave", "kill"]
        if held_bytes >= least + NOTICEABLE_BYTES:
            choices += ["shrink"] * 3
        if self._campaign.neighbours == "any" and held_bytes < ROOM_FOR_STRANGERS:
            choices += ["grow"] * 3
        match self._dice.choice(choices or ["stay"]):
            case "stay":
                return
            case "shrink":
                self._change(-self._size(held_bytes - least))
            case "grow":
                self._change(self._size(ROOM_FOR_STRANGERS - held_bytes))
            case how:
                self._tell_stranger(how)
                self._stranger_bytes = None

    def _size(self, most_bytes: int) -> int:
        """How much a stranger moves at once."""
        least = 1 if self._campaign.neighbours == "any" else NOTICEABLE_BYTES
        return self._dice.randint(least, most_bytes)

    def _change(self, size_bytes: int) -> None:
        assert self._stranger_bytes is not None
        self._tell_stranger("change", size_bytes)
        self._stranger_bytes += size_bytes

    def _tell_stranger(self, *order: Any) -> None:
        self._report.acted_at.update(worker.at for worker in self._workers)
        self._bench.strangers.asked(*order)
        self._report.trace.append(("stranger", " ".join(str(word) for word in (order[0], *order[-1:]))))
        self._check_capacity(self._stranger_device)

    # What must hold.

    def _check_capacity(self, index: int) -> None:
        used_bytes, total_bytes = sum(self._file.process_table(index).values()), self._machine.total_bytes[index]
        if used_bytes > total_bytes:
            self._report.faults.append(f"device {index} of {total_bytes} bytes has {used_bytes} in use")

    def _check_bytes(self) -> None:
        """What the device recorded is what the ledgers say, and no more than was budgeted."""
        for worker in self._workers:
            if worker.state is not State.READY:
                continue
            figures, index = self._report.figures[worker.name], PLACES[self._place][worker.stage_id]
            sizes, recorded = figures["sizes"], self._file.process_table(index)[worker.child.process.pid]
            kept = sum(sizes[name] for name in ("context", "weights", "non_torch", "graphs"))
            if recorded != kept + figures["kv_given"] or figures["held"] not in (None, recorded):
                self._report.faults.append(f"{worker.name} holds {recorded} bytes on the device: {figures}")
            if recorded > worker.stage.budget_bytes:
                self._report.faults.append(f"{worker.name} holds {recorded}, more than its budget: {figures}")

    def _take_down(self) -> None:
        if self._stranger_bytes is not None:
            self._tell_stranger("leave")
        for worker in self._workers:
            if worker.state is State.READY:
                assert worker.step() == ["closed"]
        left = {index: table for index in self._machine.total_bytes if (table := self._file.process_table(index))}
        if left:
            self._report.faults.append(f"left on the devices: {left}")


@contextmanager
def bench(directory: Path) -> Iterator[Bench]:
    """A bench that is closed in any case."""
    made = Bench(directory)
    try:
        yield made
    finally:
        made.close()


@dataclass
class Tally:
    """What many interleavings of one campaign came to."""

    campaign: Campaign
    rounds: int = 0
    steps: int = 0
    refused: int = 0
    elapsed_s: float = 0.0
    schedules: set[int] = field(default_factory=set)
    edges: set[str] = field(default_factory=set)
    acted_at: set[str] = field(default_factory=set)
    blocks: dict[str, set[int]] = field(default_factory=dict)
    failed: list[Report] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.rounds += 1
        self.steps += len(report.trace)
        self.refused += len(report.refused)
        self.schedules.add(hash(tuple(report.trace)))
        self.edges.update(edge for who, edge in report.trace if who != "stranger")
        self.acted_at.update(report.acted_at)
        for name, figures in report.figures.items():
            self.blocks.setdefault(name, set()).add(figures["blocks"])
        if report.faults:
            self.failed.append(report)

    def __str__(self) -> str:
        acted = f"neighbours acted at {len(self.acted_at & self.edges)} of {len(self.edges)} kinds of edge, "
        return (
            f"{self.campaign!s:<17} {self.rounds} interleavings, {len(self.schedules)} distinct, {self.steps} edges, "
            f"{acted if self.acted_at else ''}{self.refused} refused as disturbed, {len(self.failed)} failed, "
            f"{self.elapsed_s:.1f} s"
        )

    def explain(self) -> str:
        """The failures, and how to see the first one again."""
        lines = [f"seed {report.seed}: {fault}" for report in self.failed for fault in report.faults]
        if self.failed:
            again = f"--only {self.campaign} --rounds 1 --seed {self.failed[0].seed}"
            lines.append(f"again: scripts/soak interleavings {again} --trace")
        return "\n".join(lines)


def run_many(bench: Bench, campaign: Campaign, rounds: int, seed: int, *, stop_at_fault: bool = False) -> Tally:
    """Interleavings with the seeds from ``seed`` on."""
    tally, started_s = Tally(campaign), time.monotonic()
    for number in range(rounds):
        tally.add(bench.run(campaign, seed + number))
        if tally.failed and stop_at_fault:
            break
    tally.elapsed_s = time.monotonic() - started_s
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak interleavings", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="interleavings of each campaign (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first interleaving; the next ones count up")
    parser.add_argument(
        "--only", choices=[str(campaign) for campaign in CAMPAIGNS], help="one campaign: DRIVER/NEIGHBOURS"
    )
    parser.add_argument("--trace", action="store_true", help="print every step")
    args = parser.parse_args()
    chosen = [campaign for campaign in CAMPAIGNS if args.only in (None, str(campaign))]
    with tempfile.TemporaryDirectory() as directory, bench(Path(directory)) as made:
        tallies = []
        for campaign in chosen:
            tallies.append(run_many(made, campaign, args.rounds, args.seed))
            print(tallies[-1], flush=True)
            if tallies[-1].failed:
                print(tallies[-1].explain(), flush=True)
        if args.trace:
            for campaign in chosen:
                for who, edge in made.run(campaign, args.seed).trace:
                    print(f"{who:>8}  {edge}")
    failed = sum(len(tally.failed) for tally in tallies)
    print(
        f"interleavings: {len(tallies)} campaigns, {sum(t.rounds for t in tallies)} interleavings, "
        f"{sum(len(t.schedules) for t in tallies)} distinct, {sum(t.steps for t in tallies)} edges, "
        f"{sum(t.elapsed_s for t in tallies):.1f} s, {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
