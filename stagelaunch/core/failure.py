"""How the failure of a stage is told: who, in which phase, why, and what its process last said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stagelaunch.core.errors import ExitCode
from stagelaunch.core.phases import Phase
from stagelaunch.core.units import format_duration


@dataclass(frozen=True)
class StageFailure:
    """One failure, first or consequence. ``stage`` is None for the deployment as a whole (boot deadline)."""

    stage: str | None
    phase: Phase | None
    error: str
    """Short kind: an exception's class name, ``exit``, ``signal``, ``deadline``, ``heartbeat``, ``device``."""
    text: str
    elapsed_s: float
    """Since the stage was spawned."""
    exit_code: ExitCode = ExitCode.STAGE_FAILED
    """What the deployment exits with when this failure is the first."""
    pid: int | None = None
    rank: int = 0
    """Of the process within its stage."""
    exit_status: int | None = None
    """What the process exited with, where that is how it failed."""
    signal: str | None = None
    """Name of the signal that killed it, where that is how it failed."""
    traceback: str = ""
    log_path: str = ""
    log_tail: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The cause in one line."""
        return next((line for line in self.text.splitlines() if line.strip()), self.error)

    def headline(self) -> str:
        """One line: the stage, its phase, the cause."""
        if self.stage is None:
            return self.summary
        where = f"stage {self.stage} failed in phase {self.phase}" if self.phase else f"stage {self.stage} failed"
        return f"{where} after {format_duration(self.elapsed_s)}: {self.summary}"


def exited(code: int | None, signal_name: str | None) -> tuple[str, str]:
    """Kind and text of a process that ended without saying why."""
    if signal_name is not None:
        hint = ", not by stagelaunch (by the kernel for want of memory? see dmesg)" if signal_name == "SIGKILL" else ""
        return "signal", f"its process was killed by {signal_name}{hint}"
    return "exit", f"its process exited with code {code} without saying why"


def render(first: StageFailure, consequences: tuple[StageFailure, ...]) -> str:
    """The whole story as one block: root cause first, its evidence, then what followed from it."""
    lines = [first.headline()]
    lines += [f"  {line}" for line in first.text.splitlines()[1:]]
    if first.traceback:
        lines += ["  traceback of the stage:", *(f"    {line}" for line in first.traceback.rstrip().splitlines())]
    elif tail := _tail(first):
        lines += [f"  last lines of {first.log_path}:", *(f"    {line}" for line in tail)]
    lines += [f"  consequence: {other.headline()}" for other in consequences]
    return "\n".join(lines)


def _tail(failure: StageFailure) -> list[str]:
    """What the log adds to what is said already."""
    said = set(failure.text.splitlines())
    return [line for line in failure.log_tail if line not in said]


def to_json(failure: StageFailure) -> dict[str, Any]:
    """Plain JSON of a failure."""
    return {
        "stage": failure.stage,
        "phase": failure.phase,
        "error": failure.error,
        "text": failure.text,
        "elapsed_s": failure.elapsed_s,
        "exit_code": int(failure.exit_code),
        "pid": failure.pid,
        "rank": failure.rank,
        "exit_status": failure.exit_status,
        "signal": failure.signal,
        "traceback": failure.traceback,
        "log_path": failure.log_path,
        "log_tail": list(failure.log_tail),
    }
