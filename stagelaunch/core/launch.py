"""The one brain of a launch: order, short circuit, roll-back and stop ladder, as a pure state machine.

`step(state, event) -> (state, commands)`: a driver performs the commands and reports back as events, the
supervisor with processes, `run_init` with threads. Not a driver itself: it owns no clock, process or thread;
time comes in with each event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from stagelaunch.core.errors import StagelaunchError


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
class StopLadder:
    """When the rungs of a stop are due, counted from its beginning and shared by all stages."""

    term_after_s: float = 10.0
    """TERM for a ready stage that was only asked; stages that were not ready get it at once."""
    kill_after_s: float = 20.0
    give_up_after_s: float = 30.0
    """What survived KILL this long after it was due is abandoned, and named."""

    def __post_init__(self) -> None:
        if not 0 <= self.term_after_s <= self.kill_after_s <= self.give_up_after_s:
            raise ValueError(f"cannot use {self}: its times must not descend; order term, kill, give up")


@dataclass(frozen=True)
class LaunchPolicy:
    """What is fixed about a launch before it begins."""

    groups: tuple[tuple[int, ...], ...]
    order: Order
    max_running_groups: int | None
    """At most so many groups boot at a time; None for all of them."""
    on_failure: OnFailure
    ladder: StopLadder = StopLadder()
    """Used by STOP only."""

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
class StageEnded:
    """What ran the stage is gone. `failure` says what was wrong with how it ended; None: nothing known."""

    stage_id: int
    failure: Failure | None
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


StageEvent = StageReady | StageFailed | StageEnded
Event = Begin | StageEvent | StopRequested | DeadlineExpired | TimePassed


# Commands: what a driver performs, in this order.


@dataclass(frozen=True)
class StartStage:
    """Start it; report StageReady, StageFailed or StageEnded."""

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


Command = StartStage | AskStage | TerminateStage | KillStage | WakeAt | Finished
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
    stop_began_at_s: float | None = None
    asked: frozenset[int] = frozenset()
    """Stages that were asked to stop and have had no TERM yet."""
    killed_at_s: float | None = None
    wake_at_s: float | None = None

    @property
    def is_ready(self) -> bool:
        """Every stage is ready and nothing speaks against it."""
        return self.mode is Mode.RUNNING and not self.ids(set(StageState) - {StageState.READY})

    @property
    def is_finished(self) -> bool:
        """Nothing will change any more."""
        return self.mode is Mode.FINISHED

    def ids(self, wanted: Iterable[StageState]) -> tuple[int, ...]:
        """The stages in one of these states, in start order."""
        wanted = frozenset(wanted)
        return tuple(stage for stage, state in self.stages.items() if state in wanted)


class IllegalEventError(StagelaunchError):
    """A driver reported what cannot be: a bug of the driver, never of the deployment."""

    def __init__(self, event: Event, stage_state: StageState | None, mode: Mode) -> None:
        self.event, self.stage_state, self.mode = event, stage_state, mode
        super().__init__(event, stage_state, mode)

    def __str__(self) -> str:
        where = "of an unknown stage" if self.stage_state is None else f"of a stage that is {self.stage_state}"
        where = where if isinstance(self.event, StageEvent) else "now"
        return f"cannot take {self.event} {where}: the launch is {self.mode}; report what was commanded, once"


def initial_state(policy: LaunchPolicy) -> LaunchState:
    """A launch that waits for `Begin`."""
    return LaunchState(policy, {stage: StageState.PENDING for group in policy.groups for stage in group})


def step(state: LaunchState, event: Event) -> tuple[LaunchState, Commands]:
    """What the launch is after the event, and what to do about it, in order.

    After the first failure or stop request nothing starts. The first failure is never replaced. A finished
    launch takes any event and does nothing. IllegalEventError for an event that no driver should send.
    """
    if state.is_finished:
        return state, ()
    _refuse_illegal(state, event)
    state, commands = _react(_note(state, event), event.at_s)
    if state.mode is not Mode.STOPPING:
        return state, commands
    if not state.ids(set(StageState) - OVER):
        return replace(state, mode=Mode.FINISHED), (*commands, Finished(_result(state)))
    return _wake(state, commands, again=isinstance(event, TimePassed))


def _refuse_illegal(state: LaunchState, event: Event) -> None:
    if isinstance(event, StageEvent):
        stage_state = state.stages.get(event.stage_id)
        failure = None if isinstance(event, StageReady) else event.failure
        misattributed = failure is not None and failure.stage_id != event.stage_id
        if stage_state in (None, StageState.PENDING) or misattributed:
            raise IllegalEventError(event, stage_state, state.mode)
    elif isinstance(event, Begin) and state.mode is not Mode.WAITING:
        raise IllegalEventError(event, None, state.mode)


# First half of a step: what the event says about the stages, without any consequence drawn.

_NEXT: dict[type[StageEvent], dict[StageState, StageState]] = {
    StageReady: {StageState.STARTING: StageState.READY},
    StageFailed: {
        StageState.STARTING: StageState.FAILED,
        StageState.READY: StageState.FAILED,
        StageState.STOPPING: StageState.STOPPING,
    },
    StageEnded: {
        StageState.STARTING: StageState.ENDED,
        StageState.READY: StageState.ENDED,
        StageState.FAILED: StageState.ENDED,
        StageState.STOPPING: StageState.ENDED,
    },
}
"""What becomes of a stage. A pair that is not listed came late or twice, and is ignored."""


def _note(state: LaunchState, event: Event) -> LaunchState:
    match event:
        case Begin():
            return replace(state, mode=Mode.RUNNING)
        case StageReady() | StageFailed() | StageEnded():
            return _note_stage(state, event)
        case StopRequested(reason):
            reason = state.stop_reason if state.stop_requests else reason
            return replace(state, stop_reason=reason, stop_requests=state.stop_requests + 1)
        case DeadlineExpired(failure) if state.mode is Mode.RUNNING and not state.was_ready:
            return _record(state, failure, stopping=False)
        case _:
            return state


def _note_stage(state: LaunchState, event: StageEvent) -> LaunchState:
    before = state.stages[event.stage_id]
    after = _NEXT[type(event)].get(before)
    if after is None:
        return state
    failure = None if isinstance(event, StageReady) else event.failure
    if failure is None and isinstance(event, StageEnded) and before in (StageState.STARTING, StageState.READY):
        failure = Failure(event.stage_id, "ended without being asked to", event.at_s)
    state = _put(state, (event.stage_id,), after)
    return state if failure is None else _record(state, failure, stopping=before is StageState.STOPPING)


def _record(state: LaunchState, failure: Failure, *, stopping: bool) -> LaunchState:
    """Keep the failure: as the first, or as a consequence. A stage fails once; how it ended adds nothing."""
    if state.first_failure is None and not stopping:
        return replace(state, first_failure=failure)
    known = {kept.stage_id for kept in (state.first_failure, *state.consequences) if kept is not None}
    if failure.stage_id in known:
        return state
    return replace(state, consequences=(*state.consequences, failure))


def _put(state: LaunchState, stages: Iterable[int], stage_state: StageState) -> LaunchState:
    return replace(state, stages={**state.stages, **dict.fromkeys(stages, stage_state)})


# Second half: what follows from it.


def _react(state: LaunchState, at_s: float) -> tuple[LaunchState, Commands]:
    troubled = state.first_failure is not None or state.stop_requests > 0
    if not troubled:
        return _start_due(state) if state.mode is Mode.RUNNING else (state, ())
    commands: Commands = ()
    if state.mode is not Mode.STOPPING:
        state = _put(state, state.ids({StageState.PENDING}), StageState.SKIPPED)
        state = replace(state, mode=Mode.STOPPING, stop_began_at_s=at_s)
        if state.policy.on_failure is OnFailure.STOP:
            state, commands = _stop_all(state)
    state, more = (_drain if state.policy.on_failure is OnFailure.DRAIN else _climb)(state, at_s)
    return state, commands + more


def _start_due(state: LaunchState) -> tuple[LaunchState, Commands]:
    """Start whatever order and the limit on running groups allow now."""
    begun = [group for group in state.policy.groups if _count(state, group, StageState.PENDING) < len(group)]
    running = [group for group in begun if _count(state, group, StageState.READY) < len(group)]
    fresh = [group for group in state.policy.groups if _count(state, group, StageState.PENDING) == len(group)]
    limit = state.policy.max_running_groups
    room = len(fresh) if limit is None else limit - len(running)
    due = [stage for group in (*running, *fresh[:room]) for stage in _next_of(state, group)]
    state = _put(state, due, StageState.STARTING)
    return replace(state, was_ready=state.was_ready or state.is_ready), tuple(map(StartStage, due))


def _next_of(state: LaunchState, group: tuple[int, ...]) -> tuple[int, ...]:
    pending = tuple(stage for stage in group if state.stages[stage] is StageState.PENDING)
    if state.policy.order is Order.OVERLAP:
        return pending
    return () if _count(state, group, StageState.STARTING) else pending[:1]


def _count(state: LaunchState, group: tuple[int, ...], wanted: StageState) -> int:
    return sum(state.stages[stage] is wanted for stage in group)


def _drain(state: LaunchState, _at_s: float) -> tuple[LaunchState, Commands]:
    """Once nothing is starting any more, ask what is ready, the last started first."""
    if state.ids({StageState.STARTING}):
        return state, ()
    ready = state.ids({StageState.READY})
    return _put(state, ready, StageState.STOPPING), tuple(map(AskStage, reversed(ready)))


def _stop_all(state: LaunchState) -> tuple[LaunchState, Commands]:
    """Ask what is ready; TERM to what is not: it cannot listen, or has nothing to hand over."""
    ready = state.ids({StageState.READY})
    other = state.ids({StageState.STARTING, StageState.FAILED})
    state = replace(_put(state, (*ready, *other), StageState.STOPPING), asked=frozenset(ready))
    return state, (*map(AskStage, ready), *map(TerminateStage, other))


def _climb(state: LaunchState, at_s: float) -> tuple[LaunchState, Commands]:
    """Every rung that is due: TERM, KILL, and in a later step than KILL, giving up."""
    left = state.ids({StageState.STOPPING})
    term_at_s, kill_at_s, give_up_at_s = _rungs(state)
    if state.killed_at_s is not None:
        return (_put(state, left, StageState.ABANDONED) if at_s >= give_up_at_s else state), ()
    commands: Commands = ()
    kill_due = at_s >= kill_at_s or state.stop_requests > 1
    if kill_due or at_s >= term_at_s:
        commands += tuple(TerminateStage(stage) for stage in left if stage in state.asked)
        state = replace(state, asked=frozenset())
    if kill_due:
        commands += tuple(map(KillStage, left))
        state = replace(state, killed_at_s=at_s)
    return state, commands


def _rungs(state: LaunchState) -> tuple[float, float, float]:
    """When TERM, KILL and giving up are due.

    Giving up counts from the KILL: one that came early or late (a second request, a driver that was held up)
    leaves the stages as long to die as one on time.
    """
    began_at_s, ladder = state.stop_began_at_s or 0.0, state.policy.ladder
    kill_at_s = began_at_s + ladder.kill_after_s
    killed_at_s = kill_at_s if state.killed_at_s is None else state.killed_at_s
    give_up_at_s = killed_at_s + (ladder.give_up_after_s - ladder.kill_after_s)
    return began_at_s + ladder.term_after_s, kill_at_s, give_up_at_s


def _wake(state: LaunchState, commands: Commands, *, again: bool) -> tuple[LaunchState, Commands]:
    """Add a WakeAt for the next rung if it is a new one, or ``again`` because a timer fired early."""
    if state.policy.on_failure is OnFailure.DRAIN:
        return state, commands
    term_at_s, kill_at_s, give_up_at_s = _rungs(state)
    wake_at_s = kill_at_s if state.killed_at_s is None else give_up_at_s
    wake_at_s = term_at_s if state.asked else wake_at_s
    if wake_at_s == state.wake_at_s and not again:
        return state, commands
    return replace(state, wake_at_s=wake_at_s), (*commands, WakeAt(wake_at_s))


def _result(state: LaunchState) -> LaunchResult:
    return LaunchResult(
        first_failure=state.first_failure,
        consequences=state.consequences,
        stop_reason=state.stop_reason,
        was_ready=state.was_ready,
        ended=state.ids({StageState.ENDED}),
        skipped=state.ids({StageState.SKIPPED}),
        abandoned=state.ids({StageState.ABANDONED}),
    )
