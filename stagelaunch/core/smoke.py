"""A smoke test as test cases: one for each stage and phase, and three for the deployment. Pure.

``cli.smoke_boot`` gathers the evidence of one boot; ``junit``, ``smoke_text`` and ``annotations`` tell the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stagelaunch.core.errors import ExitCode
from stagelaunch.core.failure import StageFailure, render
from stagelaunch.core.phases import BOOT_PHASES, Phase

DEPLOYMENT = "deployment"
"""The part of the cases that are about no stage; no stage's case has one of their names."""
ADMISSION, MEMORY, PROCESSES = "admission", "memory", "processes"
PROBE, STOP = "probe", "stop"
STAGE_CASES = (*BOOT_PHASES, PROBE, STOP)


class Verdict(StrEnum):
    """How a case ended. One that was never reached is skipped."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Case:
    """One test case. ``message`` is one line, ``details`` the evidence."""

    part: str
    """The stage, or DEPLOYMENT."""
    name: str
    verdict: Verdict
    took_s: float = 0.0
    message: str = ""
    details: str = ""


@dataclass(frozen=True)
class Probed:
    """One stage's answer to a probe; ``error`` says what is wrong with it."""

    took_s: float
    error: str | None = None


@dataclass(frozen=True)
class Evidence:
    """All that was seen of one boot."""

    stages: tuple[str, ...] = ()
    started: bool = False
    """It was admitted, and stages were about to be spawned."""
    admission_s: float = 0.0
    bodies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Each stage as `status` shows it, as late as it could be seen."""
    exit_code: int | None = None
    """Of the boot; None if it could not say how it ended."""
    failure: Mapping[str, Any] | None = None
    """The first failure, as the runtime's state records it."""
    consequences: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    """Its last words, or what is known instead of them."""
    probes: Mapping[str, Probed] = field(default_factory=dict)
    stop_s: float | None = None
    """From the request to stop to its end."""
    interrupted: bool = False
    leftovers: tuple[str, ...] = ()
    """What it said itself that it left."""
    memory: tuple[str, ...] | None = None
    """What was missing afterwards; None if nobody looked."""
    processes: tuple[str, ...] | None = None
    """What was alive afterwards; None if nobody looked."""


@dataclass(frozen=True)
class SmokeRun:
    """One boot and its cases."""

    number: int
    cases: tuple[Case, ...]
    exit_code: int
    began: str
    """Wall-clock time, ISO 8601."""
    took_s: float
    lines: tuple[str, ...] = ()
    """What the boot said."""

    def count(self, verdict: Verdict) -> int:
        """How many of its cases ended so."""
        return sum(case.verdict is verdict for case in self.cases)


@dataclass(frozen=True)
class SmokeReport:
    """All boots of one smoke test so far."""

    deployment: str
    repeat: int
    """How many were asked for."""
    runs: tuple[SmokeRun, ...] = ()

    @property
    def exit_code(self) -> int:
        """Of the first boot that was not good; an interruption before the first is one too."""
        if not self.runs:
            return ExitCode.INTERRUPTED
        return next((run.exit_code for run in self.runs if run.exit_code), ExitCode.OK)

    def count(self, verdict: Verdict) -> int:
        """How many cases ended so."""
        return sum(run.count(verdict) for run in self.runs)

    def case_name(self, run: SmokeRun, case: Case) -> str:
        """Unique among all repeats."""
        return case.name if self.repeat == 1 else f"{case.name} [{run.number}/{self.repeat}]"


def exit_code(seen: Evidence) -> int:
    """What is left outweighs everything, then the interruption, then how the boot ended, then the probes."""
    if seen.memory or seen.processes:
        return ExitCode.CLEANUP_INCOMPLETE
    if seen.interrupted:
        return ExitCode.INTERRUPTED
    if seen.exit_code is None:
        return ExitCode.INTERNAL
    failed_probe = any(probe.error for probe in seen.probes.values())
    return seen.exit_code or (ExitCode.STAGE_FAILED if failed_probe else ExitCode.OK)


def cases(seen: Evidence) -> tuple[Case, ...]:
    """Every case there is, whatever was reached: admission, the stages in the order of their file, memory, processes.

    Of a boot that failed at least one is red.
    """
    stages = [case for name in seen.stages for case in _stage(seen, name)]
    found = [
        _admission(seen),
        *stages,
        _left(MEMORY, seen, None if seen.memory is None else (*_other_leftovers(seen), *seen.memory)),
        _left(PROCESSES, seen, seen.processes),
    ]
    failed = any(case.verdict is Verdict.FAILED for case in found)
    if not failed and exit_code(seen) not in (ExitCode.OK, ExitCode.INTERRUPTED):
        # It ended badly, and that is no stage's case: a supervisor that died, an error of ours.
        found[-1] = Case(DEPLOYMENT, PROCESSES, Verdict.FAILED, 0.0, _first_line(seen.text), seen.text)
    return tuple(found)


def _admission(seen: Evidence) -> Case:
    if seen.started:
        return Case(DEPLOYMENT, ADMISSION, Verdict.PASSED, seen.admission_s)
    if seen.interrupted:
        return Case(DEPLOYMENT, ADMISSION, Verdict.SKIPPED, seen.admission_s, "interrupted")
    return Case(DEPLOYMENT, ADMISSION, Verdict.FAILED, seen.admission_s, _first_line(seen.text), seen.text)


def _other_leftovers(seen: Evidence) -> tuple[str, ...]:
    """What the boot said it left that is no stage's process."""
    return tuple(text for text in seen.leftovers if not text.startswith("stage "))


def _left(name: str, seen: Evidence, found: tuple[str, ...] | None) -> Case:
    if found is None:
        why = "interrupted" if seen.interrupted else "nothing was started"
        return Case(DEPLOYMENT, name, Verdict.SKIPPED, 0.0, why)
    if not found:
        return Case(DEPLOYMENT, name, Verdict.PASSED)
    return Case(DEPLOYMENT, name, Verdict.FAILED, 0.0, found[0], "\n".join(found))


def _stage(seen: Evidence, name: str) -> Iterator[Case]:
    body = seen.bodies.get(name)
    if body is None or body.get("phase") is None:
        yield from (Case(name, case, Verdict.SKIPPED, 0.0, "not started") for case in STAGE_CASES)
        return
    spans = {span["phase"]: float(span["took_s"]) for span in body.get("phases", ())}
    failed_in, story = _failure_of(seen, name, spans)
    pending = next((phase for phase in BOOT_PHASES if phase not in spans), None)
    for phase in BOOT_PHASES:
        if phase == failed_in:
            yield Case(name, phase, Verdict.FAILED, _span_s(seen, name, spans), *story)
        elif phase in spans:
            yield Case(name, phase, Verdict.PASSED, spans[phase])
        else:
            why = _why_not(seen, name) if phase == pending else "not reached"
            yield Case(name, phase, Verdict.SKIPPED, 0.0, why)
    yield _probe(seen, name, story if failed_in == Phase.READY else None)
    yield _stop(seen, name, failed_in, story)


def _failure_of(seen: Evidence, name: str, spans: Mapping[str, float]) -> tuple[str | None, tuple[str, str]]:
    """The phase in which the boot failed in this stage, with message and details; None if it did not.

    A failure of the deployment as a whole (boot deadline) is one of each stage that was not ready, in its phase.
    """
    if seen.failure is not None and seen.failure.get("stage") is not None:
        told = _told(seen.failure)
        return (seen.failure.get("phase") if seen.failure["stage"] == name else None), told
    pending = next((phase for phase in BOOT_PHASES if phase not in spans), None)
    if seen.interrupted or not seen.exit_code or not seen.text:
        pending = None
    return pending, (_first_line(seen.text), seen.text)


def _span_s(seen: Evidence, name: str, spans: Mapping[str, float]) -> float:
    """How long the failed phase took: what its stage's age is more than the phases before it."""
    if seen.failure is None or seen.failure.get("stage") != name:
        return 0.0
    return max(0.0, float(seen.failure.get("elapsed_s", 0.0)) - sum(spans.values()))


def _why_not(seen: Evidence, name: str) -> str:
    for other in seen.consequences:
        if other.get("stage") == name:
            return f"consequence: {_told(other)[0]}"
    if seen.interrupted:
        return "interrupted"
    return "stopped, because the boot failed elsewhere"


def _probe(seen: Evidence, name: str, story: tuple[str, str] | None) -> Case:
    probed = seen.probes.get(name)
    if story is not None:
        return Case(name, PROBE, Verdict.FAILED, 0.0 if probed is None else probed.took_s, *story)
    if probed is None:
        return Case(name, PROBE, Verdict.SKIPPED, 0.0, "interrupted" if seen.interrupted else "not reached")
    if probed.error is None:
        return Case(name, PROBE, Verdict.PASSED, probed.took_s)
    return Case(name, PROBE, Verdict.FAILED, probed.took_s, _first_line(probed.error), probed.error)


def _stop(seen: Evidence, name: str, failed_in: str | None, story: tuple[str, str]) -> Case:
    """A stop takes as long as the deployment's: its stages stop together, under one deadline."""
    stuck = [text for text in seen.leftovers if text.startswith(f"stage {name}:")]
    took_s = seen.stop_s or 0.0
    if stuck:
        return Case(name, STOP, Verdict.FAILED, took_s, stuck[0], "\n".join(stuck))
    if failed_in == Phase.STOP:
        return Case(name, STOP, Verdict.FAILED, took_s, *story)
    if seen.failure is not None and seen.failure.get("stage") == name:
        return Case(name, STOP, Verdict.SKIPPED, 0.0, "it had failed")
    if seen.exit_code is None:
        return Case(name, STOP, Verdict.SKIPPED, 0.0, "interrupted" if seen.interrupted else "not reached")
    return Case(name, STOP, Verdict.PASSED, took_s)


def _told(body: Mapping[str, Any]) -> tuple[str, str]:
    """Headline, and the evidence with it: traceback or log tail."""
    phase = body.get("phase")
    failure = StageFailure(
        stage=body.get("stage"),
        phase=Phase(phase) if phase else None,
        error=str(body.get("error", "")),
        text=str(body.get("text", "")),
        elapsed_s=float(body.get("elapsed_s", 0.0)),
        traceback=str(body.get("traceback", "")),
        log_path=str(body.get("log_path", "")),
        log_tail=tuple(body.get("log_tail", ())),
    )
    return failure.headline(), render(failure, ())


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "it did not say why")
