"""The fault matrix: each stage of three, in each phase, goes wrong in each way; what then must hold is looked at.

A program (``scripts/soak faults``) that prints the table, and functions for the tests, which run a slice of it. Real
supervisor, real workers, simulated devices.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deployments import HERE, Ran, Site, three_stages

STAGES = ("alpha", "beta", "gamma")
PHASES = ("spawn", "import", "context", "load", "profile", "size", "allocate", "capture", "ready", "stop")
KINDS = (
    "raise",
    "sysexit",
    "osexit",
    "sigkill",
    "segv",
    "abort",
    "hang",
    "deaf",
    "sigstop",
    "ignoreterm",
    "oom",
    "session",
)
TIMEOUTS = {
    "phase": "20s", "stage": "60s", "boot": "80s", "lock": "40s", "heartbeat": "3s", "stop": "2s", "stop_booting": "1s",
}  # fmt: skip
LADDER_S = 2.0
SLACK_S = 4.0
"""For a loaded machine, on top of the ladder: two looks at the devices are processes of their own."""
_TROUBLE = re.compile(r"FAILED in|\): ended \(|stopping: ")


@dataclass(frozen=True, order=True)
class Cell:
    """Who goes wrong, when, how."""

    stage: str
    phase: str
    kind: str

    def __str__(self) -> str:
        return f"{self.stage}/{self.phase}/{self.kind}"


CELLS = tuple(
    Cell(stage, phase, kind)
    for stage, phase, kind in itertools.product(STAGES, PHASES, KINDS)
    # A process that has imported nothing cannot run out of device memory.
    if (phase, kind) != ("spawn", "oom")
)


@dataclass(frozen=True)
class Expected:
    """What must come of a cell. ``kind`` None: the deployment takes no harm and is stopped by `down`."""

    kind: str | None
    code: int


_DEATHS = {"osexit": "exit", "session": "exit", "sigkill": "signal", "segv": "signal", "abort": "signal"}


def expected(cell: Cell) -> Expected:
    """The culprit's failure, and the exit code of the deployment."""
    match cell.phase, cell.kind:
        case "stop", _:
            return Expected(None, 0)
        case "ready", "raise" | "oom":
            # It answers the probe that its step failed, and is still there.
            return Expected(None, 0)
        case _, kind if kind in _DEATHS:
            return Expected(_DEATHS[kind], 1)
        case "spawn", "raise" | "sysexit":
            return Expected("exit", 1)
        case _, "raise":
            return Expected("InjectedError", 1)
        case _, "sysexit":
            return Expected("SystemExit", 1)
        case "capture", "oom":
            return Expected("BudgetOvershootError", 1)
        case _, "oom":
            return Expected("OutOfMemoryError", 1)
        case "ready", _:
            return Expected("heartbeat", 1)
        case "spawn" | "import", _:
            return Expected("deadline", 1)
        case _, "sigstop" | "deaf":
            return Expected("heartbeat", 1)
        case _:
            return Expected("deadline", 1)


@dataclass(frozen=True)
class Verdict:
    """What came of a cell: the time from the first sign of trouble to the end, and what should not be."""

    cell: Cell
    took_s: float
    problems: tuple[str, ...]


class FaultySite(Site):
    """A site whose stage goes wrong as the cell says."""

    def __init__(self, directory: Path, cell: Cell) -> None:
        super().__init__(directory, three_stages(), {"timeouts": TIMEOUTS})
        self.cell = cell
        if cell.phase != "spawn":
            self.stages[STAGES.index(cell.stage)]["options"] = {"fault": f"{cell.phase}:{cell.kind}"}

    def environment(self) -> dict[str, str]:
        """The site's own; for a fault at spawn with what makes one."""
        environment = super().environment()
        if self.cell.phase == "spawn":
            path = os.pathsep.join((str(HERE / "at_spawn"), environment["PYTHONPATH"]))
            fault = f"{STAGES.index(self.cell.stage)}:{self.cell.kind}"
            environment |= {"PYTHONPATH": path, "STAGELAUNCH_TEST_SPAWN_FAULT": fault}
        return environment


def run_cell(directory: Path, cell: Cell) -> Verdict:
    """Boot, let it go wrong, look."""
    site = FaultySite(directory, cell)
    process = site.start("up", str(site.write()), "--quiet")
    assert process.stdout is not None
    assert process.stderr is not None
    if cell.phase in ("ready", "stop") and "site: ready" in process.stdout.readline():
        if cell.phase == "ready":
            site.run("probe", str(site.config), cell.stage)
        if expected(cell).kind is None:
            site.run("down", str(site.config))
    lines, trouble_at_s = [], None
    for line in process.stderr:
        lines.append(line)
        if trouble_at_s is None and _TROUBLE.search(line):
            trouble_at_s = time.monotonic()
    code = process.wait()
    took_s = time.monotonic() - (trouble_at_s or time.monotonic())
    ran = Ran(code, process.stdout.read(), "".join(lines))
    process.stdout.close()
    process.stderr.close()
    return Verdict(cell, took_s, tuple(_problems(site, cell, ran, took_s)))


def _problems(site: Site, cell: Cell, ran: Ran, took_s: float) -> Iterator[str]:
    wanted, state = expected(cell), site.state()
    first = state.get("first_failure")
    if ran.code != wanted.code:
        yield f"exit code {ran.code}, not {wanted.code}: {ran.stderr[-2000:]}"
    found = None if first is None else (first["stage"], first["phase"], first["error"])
    named = None if wanted.kind is None else (cell.stage, cell.phase, wanted.kind)
    if found != named:
        yield f"the culprit is {found}, not {named}"
    if cell.phase != "stop" and any(other["stage"] == cell.stage for other in state.get("consequences", ())):
        yield "the culprit is among the consequences"
    if state.get("leftovers"):
        yield f"left behind: {state['leftovers']}"
    if missing := [text for text in _evidence(cell) if text not in ran.stderr]:
        yield f"the report lacks {missing}"
    if took_s > LADDER_S + SLACK_S:
        yield f"the end took {took_s:.1f}s"
    try:
        site.assert_nothing_left(ran)
    except AssertionError as error:
        yield f"something is left: {error}"


def _evidence(cell: Cell) -> tuple[str, ...]:
    """What the report must show beside the culprit: where it raised, where it died, where it hangs."""
    if expected(cell).kind is None or cell.phase == "spawn":
        return ()
    match cell.kind:
        case "raise":
            return ("raise InjectedError",)
        case "segv" | "abort" | "hang" | "deaf" | "ignoreterm":
            # faulthandler's words, from the stage's own log.
            return ("in misbehave", "light_engine.py")
        case _:
            return ()


def cover(seed: int) -> tuple[Cell, ...]:
    """A slice in which each phase and each way occurs, drawn by the seed."""
    draw = random.Random(seed)
    phases = [*PHASES, *draw.sample(PHASES[1:], len(KINDS) - len(PHASES))]
    while True:
        kinds = draw.sample(KINDS, len(KINDS))
        cells = tuple(Cell(draw.choice(STAGES), phase, kind) for phase, kind in zip(phases, kinds))
        if set(cells) <= set(CELLS):
            return cells


def table(verdicts: Iterable[Verdict]) -> str:
    """Rows are stage and phase, columns the ways; the seconds from trouble to the end, or FAIL."""
    found = {verdict.cell: verdict for verdict in verdicts}
    lines = [f"{'':<17}" + "".join(f"{kind:>11}" for kind in KINDS)]
    for stage, phase in itertools.product(STAGES, PHASES):
        row = [found.get(Cell(stage, phase, kind)) for kind in KINDS]
        if any(row):
            texts = ["-" if v is None else "FAIL" if v.problems else f"{v.took_s:.1f}s" for v in row]
            lines.append(f"{stage + ' ' + phase:<17}" + "".join(f"{text:>11}" for text in texts))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix, or a part of it."""
    parser = argparse.ArgumentParser(prog="scripts/soak faults", description=__doc__)
    parser.add_argument("--cover", type=int, metavar="SEED", help="only a slice that has each phase and each way once")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose STAGE/PHASE/KIND contains TEXT")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th cell, from the I-th on")
    args = parser.parse_args(arguments)
    part, of = map(int, args.part.split("/"))
    cells = CELLS if args.cover is None else cover(args.cover)
    cells = tuple(cell for cell in cells if args.only in str(cell))[part - 1 :: of]
    verdicts: list[Verdict] = []
    # In any order, so that a run that is broken off has seen something of everything.
    for cell in random.Random(0).sample(cells, len(cells)):
        with tempfile.TemporaryDirectory() as directory:
            verdicts.append(run_cell(Path(directory), cell))
        print(f"{len(verdicts)}/{len(cells)} {cell}: {verdicts[-1].took_s:.1f}s", file=sys.stderr, flush=True)
        for problem in verdicts[-1].problems:
            print(f"{cell}: {problem}", flush=True)
    bad = sum(bool(verdict.problems) for verdict in verdicts)
    print(table(verdicts))
    worst_s = max((verdict.took_s for verdict in verdicts), default=0.0)
    print(f"faults: {len(verdicts)} cells, {bad} failed; from trouble to the end at most {worst_s:.1f}s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
