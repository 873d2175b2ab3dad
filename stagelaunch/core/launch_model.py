"""The vocabulary of a launch: its policy, its states, the events a driver reports and the commands it performs.

Plain data; what follows from what is decided in ``core.launch``, which is also where drivers import it from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stagelaunch.core.descent import Descent, StopLadder
from stagelaunch.core.restarts import RestartBudget


class Order(StrEnum):
    """How the stages of one group boot: one after another, each when the one before is ready, or together."""

    SERIAL = "serial"
    OVERLAP = "overlap"


class OnFailure(StrEnum):
    """What happens to running stages once something failed or a stop was asked for."""

    DRAIN = "drain"
    """Starting stages finish first, then the ready ones are asked to stop. For threads: nothing can kill one."""
    STOP = "stop"
    """All stop at once, down the ladder of ask, TERM and KILL. For processes."""


@dataclass(frozen=True)
class LaunchPolicy:
    """What is fixed about a launch before it begins."""

    groups: tuple[tuple[int, ...], ...]
    order: Order
    max_running_groups: int | None
    """At most so many groups boot at a time; None for all of them."""
    on_failure: OnFailure
    ladder: StopLadder = field(default_factory=StopLadder)
    """Used by STOP only."""
    restarts: RestartBudget | None = None
    """How often a stage that fails once all were ready is started again by itself; None: never."""

    def __post_init__(self) -> None:
        stages = [stage for group in self.groups for stage in group]
        if len(set(stages)) < len(stages):
            raise ValueError(f"cannot launch {self.groups}: a stage is in it twice; list each once")
        if self.max_running_groups is not None and self.max_running_groups < 1:
            raise ValueError(f"cannot launch {self.max_running_groups} groups at a time; allow at least 1")


class StageState(StrEnum):
    """Where one stage is. ENDED, SKIPPED and ABANDONED are over for good."""

    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    """It reported a failure; its process may still be there."""
    RETRYING = "retrying"
    """Its process is being ended, to be started once more."""
    RESTARTING = "restarting"
    """After the boot: its process is being ended, to be started again."""
    COOLING = "cooling"
    """It has ended and waits for the time of its restart."""
    ADMITTING = "admitting"
    """It is being looked whether it still fits on its device."""
    STOPPING = "stopping"
    ENDED = "ended"
    SKIPPED = "skipped"
    """Never started, and never will be."""
    ABANDONED = "abandoned"
    """Still there after KILL."""


OVER = frozenset({StageState.ENDED, StageState.SKIPPED, StageState.ABANDONED})


class Mode(StrEnum):
    """Where the launch as a whole is. RUNNING covers the boot and the watch over ready stages after it."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True)
class Failure:
    """Something went wrong: in which stage (None: in the launch as a whole), why, and when (monotonic)."""

    stage_id: int | None
    cause: object
    at_s: float
    is_final: bool = False
    """Started again, the stage would only fail again."""


# Events: what a driver reports. Every time is monotonic.


@dataclass(frozen=True)
class Begin:
    """The launch may start."""

    at_s: float


@dataclass(frozen=True)
class StageReady:
    """The stage has booted."""

    stage_id: int
    at_s: float


@dataclass(frozen=True)
class StageFailed:
    """The stage reported a failure, or its driver found one; whatever runs it may still be there."""

    stage_id: int
    failure: Failure
    at_s: float


@dataclass(frozen=True)
class StageNeedsRetry:
    """The stage failed while it booted, in a way that a fresh process may mend. Granted once for each stage."""

    stage_id: int
    failure: Failure
    at_s: float


@dataclass(frozen=True)
class StageEnded:
    """What ran the stage is gone. `failure` says what was wrong with how it ended; None: nothing known."""

    stage_id: int
    failure: Failure | None
    at_s: float


@dataclass(frozen=True)
class RestartRequested:
    """Somebody wants this stage to be stopped in good order and started again. Not counted, without a pause."""

    stage_id: int
    at_s: float


@dataclass(frozen=True)
class StageAdmitted:
    """Answer to AdmitStage: it fits."""

    stage_id: int
    at_s: float


@dataclass(frozen=True)
class StageRefused:
    """Answer to AdmitStage: it does not."""

    stage_id: int
    failure: Failure
    at_s: float


@dataclass(frozen=True)
class StopRequested:
    """Somebody wants an orderly stop; a second request means now."""

    reason: object
    at_s: float


@dataclass(frozen=True)
class DeadlineExpired:
    """The boot as a whole took too long. Without meaning once all were ready or a stop is under way."""

    failure: Failure
    at_s: float


@dataclass(frozen=True)
class TimePassed:
    """The time of the last `WakeAt` has come."""

    at_s: float


StageEvent = StageReady | StageFailed | StageNeedsRetry | StageEnded | RestartRequested | StageAdmitted | StageRefused
Event = Begin | StageEvent | StopRequested | DeadlineExpired | TimePassed


# Commands: what a driver performs, in this order.


@dataclass(frozen=True)
class StartStage:
    """Start it; report StageReady, StageFailed or StageEnded."""

    stage_id: int


@dataclass(frozen=True)
class AdmitStage:
    """Look whether the stage still fits beside the others; report StageAdmitted or StageRefused."""

    stage_id: int


@dataclass(frozen=True)
class AskStage:
    """Ask a ready stage to clean up and end; report StageEnded."""

    stage_id: int


@dataclass(frozen=True)
class TerminateStage:
    """TERM to the stage's leader."""

    stage_id: int


@dataclass(frozen=True)
class KillStage:
    """KILL to everything of the stage. Never without a TerminateStage before."""

    stage_id: int


@dataclass(frozen=True)
class WakeAt:
    """Send TimePassed at this time; replaces an earlier one."""

    at_s: float


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended."""

    first_failure: Failure | None
    """None after an orderly stop, also if stages failed while they were being stopped."""
    consequences: tuple[Failure, ...]
    """Later failures, at most one for a stage, in the order they were reported."""
    stop_reason: object | None
    """Of the first request to stop, if there was one."""
    was_ready: bool
    """Every stage was ready at the same time once."""
    ended: tuple[int, ...]
    skipped: tuple[int, ...]
    abandoned: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """Nothing runs any more, or what does is abandoned. Sent exactly once, as the last command."""

    result: LaunchResult


Command = StartStage | AdmitStage | AskStage | TerminateStage | KillStage | WakeAt | Finished
Commands = tuple[Command, ...]


@dataclass(frozen=True)
class LaunchState:
    """Everything a launch knows. Made by `initial_state`, replaced by `step`, never changed."""

    policy: LaunchPolicy
    stages: Mapping[int, StageState]
    mode: Mode = Mode.WAITING
    first_failure: Failure | None = None
    consequences: tuple[Failure, ...] = ()
    stop_reason: object | None = None
    stop_requests: int = 0
    was_ready: bool = False
    begun: frozenset[int] = frozenset()
    """Stages that were started at least once."""
    retried: frozenset[int] = frozenset()
    """Stages that have had the second chance of their present boot."""
    restarts: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """When each stage was granted a restart after a failure."""
    restart_at_s: Mapping[int, float] = field(default_factory=dict)
    """Of stages that are to be started again: when."""
    descents: Mapping[int, Descent] = field(default_factory=dict)
    """Of stages whose process is to end: how far down the ladder."""
    wake_at_s: float | None = None

    @property
    def is_ready(self) -> bool:
        """Every stage is ready and nothing speaks against it."""
        return self.mode is Mode.RUNNING and not self.ids(set(StageState) - {StageState.READY})

    def may_retry(self, stage_id: int) -> bool:
        """Whether a failure of the stage now may be answered by starting it once more."""
        booting = self.mode is Mode.RUNNING and self.stages.get(stage_id) is StageState.STARTING
        return booting and stage_id not in self.retried

    def restart_at(self, stage_id: int, now_s: float) -> float | None:
        """When the stage is started again if it fails now; None when its failure stops all."""
        budget = self.policy.restarts
        if budget is None or self.mode is not Mode.RUNNING or not self.was_ready:
            return None
        return budget.next_at_s(self.restarts.get(stage_id, ()), now_s)

    @property
    def is_finished(self) -> bool:
        """Nothing will change any more."""
        return self.mode is Mode.FINISHED

    def ids(self, wanted: Iterable[StageState]) -> tuple[int, ...]:
        """The stages in one of these states, in start order."""
        wanted = frozenset(wanted)
        return tuple(stage for stage, state in self.stages.items() if state in wanted)
