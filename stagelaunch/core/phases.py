"""The phases of a booting stage and the device lock each step takes: the one table.

DESIGN: a step that measures is exclusive, a step that changes device memory is shared, the rest take no lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What a stage is doing, in boot order. A stage that is ready stays READY until it is stopped."""

    SPAWN = "spawn"
    IMPORT = "import"
    CONTEXT = "context"
    LOAD = "load"
    PROFILE = "profile"
    SIZE = "size"
    ALLOCATE = "allocate"
    CAPTURE = "capture"
    READY = "ready"
    STOP = "stop"


class LockMode(StrEnum):
    """How a device lock is held."""

    NONE = "none"
    SHARED = "shared"
    EXCLUSIVE = "exclusive"


@dataclass(frozen=True)
class Step:
    """One step of a phase and the lock it runs under."""

    phase: Phase
    name: str
    lock: LockMode
    why: str


STEPS: tuple[Step, ...] = (
    Step(Phase.SPAWN, "start the process", LockMode.NONE, "touches no device"),
    Step(Phase.IMPORT, "import the libraries", LockMode.NONE, "touches no device"),
    Step(Phase.CONTEXT, "create the device context", LockMode.EXCLUSIVE, "the stage's own overhead is measured"),
    Step(Phase.LOAD, "allocate the parameters", LockMode.SHARED, "changes device memory"),
    Step(Phase.LOAD, "read the weights into them", LockMode.NONE, "fills memory that is already counted"),
    Step(Phase.PROFILE, "warm up with the largest batch", LockMode.SHARED, "compiles, tunes, creates workspaces"),
    Step(
        Phase.PROFILE,
        "run it again and measure",
        LockMode.EXCLUSIVE,
        "must not be disturbed (--reuse-plan: not run)",
    ),
    Step(Phase.SIZE, "size the KV cache", LockMode.NONE, "arithmetic"),
    Step(Phase.ALLOCATE, "check free memory, then allocate", LockMode.EXCLUSIVE, "check and act as one"),
    Step(Phase.CAPTURE, "capture the graphs, one by one", LockMode.SHARED, "changes device memory"),
)

BOOT_PHASES: tuple[Phase, ...] = tuple(dict.fromkeys(step.phase for step in STEPS))
"""The phases from spawn to capture, each once, in order."""


def lock_of(phase: Phase) -> LockMode:
    """The strongest lock a phase takes in any of its steps; NONE for a phase without steps."""
    order = list(LockMode)
    return max((step.lock for step in STEPS if step.phase is phase), key=order.index, default=LockMode.NONE)
