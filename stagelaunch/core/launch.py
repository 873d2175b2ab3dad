"""The one brain of a launch: order, short circuit, roll-back and stop ladder, as a pure state machine.

`step(state, event) -> (state, commands)`: a driver performs the commands and reports back as events, the
supervisor with processes, `run_init` with threads. Not a driver itself: it owns no clock, process or thread;
time comes in with each event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stagelaunch.core.errors import StagelaunchError
from stagelaunch.core.launch_model import (
    OVER,
    AskStage,
    Begin,
    Command,
    Commands,
    DeadlineExpired,
    Event,
    Failure,
    Finished,
    KillStage,
    LaunchPolicy,
    LaunchResult,
    LaunchState,
    Mode,
    OnFailure,
    Order,
    StageEnded,
    StageEvent,
    StageFailed,
    StageNeedsRetry,
    StageReady,
    StageState,
    StartStage,
    StopLadder,
    StopRequested,
    TerminateStage,
    TimePassed,
    WakeAt,
)

__all__ = [
    "OVER",
    "AskStage",
    "Begin",
    "Command",
    "Commands",
    "DeadlineExpired",
    "Event",
    "Failure",
    "Finished",
    "IllegalEventError",
    "KillStage",
    "LaunchPolicy",
    "LaunchResult",
    "LaunchState",
    "Mode",
    "OnFailure",
    "Order",
    "StageEnded",
    "StageEvent",
    "StageFailed",
    "StageNeedsRetry",
    "StageReady",
    "StageState",
    "StartStage",
    "StopLadder",
    "StopRequested",
    "TerminateStage",
    "TimePassed",
    "WakeAt",
    "initial_state",
    "step",
]


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
    noted = _note(state, event)
    state, commands = _react(noted, event.at_s)
    if isinstance(event, StageNeedsRetry) and noted.stages[event.stage_id] is StageState.RETRYING:
        commands = (*_end_for_retry(state, event.stage_id), *commands)
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
        StageState.RETRYING: StageState.FAILED,
        StageState.STOPPING: StageState.STOPPING,
    },
    StageEnded: {
        StageState.RETRYING: StageState.PENDING,
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
        case StageReady() | StageFailed() | StageNeedsRetry() | StageEnded():
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
    if isinstance(event, StageNeedsRetry):
        if state.may_retry(event.stage_id):
            state = replace(state, retried=state.retried | {event.stage_id})
            return _put(state, (event.stage_id,), StageState.RETRYING)
        event = StageFailed(event.stage_id, event.failure, event.at_s)
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
    state = _give_up_pending(state)
    if state.mode is not Mode.STOPPING:
        state = replace(state, mode=Mode.STOPPING, stop_began_at_s=at_s)
        if state.policy.on_failure is OnFailure.STOP:
            state, commands = _stop_all(state)
    state, more = (_drain if state.policy.on_failure is OnFailure.DRAIN else _climb)(state, at_s)
    return state, commands + more


def _end_for_retry(state: LaunchState, stage_id: int) -> Commands:
    """Its process has said its last word and holds nothing worth an orderly stop. A thread ends by itself."""
    if state.policy.on_failure is OnFailure.DRAIN:
        return ()
    return TerminateStage(stage_id), KillStage(stage_id)


def _give_up_pending(state: LaunchState) -> LaunchState:
    """What waits to be started never will be; a stage between its two tries has ended."""
    pending = state.ids({StageState.PENDING})
    state = _put(state, pending, StageState.SKIPPED)
    return _put(state, state.retried.intersection(pending), StageState.ENDED)


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
    return () if _count(state, group, StageState.STARTING, StageState.RETRYING) else pending[:1]


def _count(state: LaunchState, group: tuple[int, ...], *wanted: StageState) -> int:
    return sum(state.stages[stage] in wanted for stage in group)


def _drain(state: LaunchState, _at_s: float) -> tuple[LaunchState, Commands]:
    """Once nothing is starting any more, ask what is ready, the last started first."""
    if state.ids({StageState.STARTING, StageState.RETRYING}):
        return state, ()
    ready = state.ids({StageState.READY})
    return _put(state, ready, StageState.STOPPING), tuple(map(AskStage, reversed(ready)))


def _stop_all(state: LaunchState) -> tuple[LaunchState, Commands]:
    """Ask what is ready; TERM to what is not: it cannot listen, or has nothing to hand over."""
    ready = state.ids({StageState.READY})
    other = state.ids({StageState.STARTING, StageState.RETRYING, StageState.FAILED})
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
