"""The one brain of a launch: order, short circuit, roll-back and stop ladder, as a pure state machine.

`step(state, event) -> (state, commands)`: a driver performs the commands and reports back as events, the
supervisor with processes, `run_init` with threads. Not a driver itself: it owns no clock, process or thread;
time comes in with each event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from stagelaunch.core.descent import Descent, Rung, StopLadder
from stagelaunch.core.errors import StagelaunchError
from stagelaunch.core.launch_model import (
    OVER,
    AdmitStage,
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
    RestartRequested,
    StageAdmitted,
    StageEnded,
    StageEvent,
    StageFailed,
    StageNeedsRetry,
    StageReady,
    StageRefused,
    StageState,
    StartStage,
    StopRequested,
    TerminateStage,
    TimePassed,
    WakeAt,
)
from stagelaunch.core.restarts import RestartBudget

__all__ = [
    "OVER",
    "AdmitStage",
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
    "RestartRequested",
    "StageAdmitted",
    "StageEnded",
    "StageEvent",
    "StageFailed",
    "StageNeedsRetry",
    "StageReady",
    "StageRefused",
    "StageState",
    "StartStage",
    "StopLadder",
    "StopRequested",
    "TerminateStage",
    "TimePassed",
    "WakeAt",
    "initial_state",
    "step",
    "with_rules",
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


def with_rules(state: LaunchState, ladder: StopLadder, restarts: RestartBudget | None) -> LaunchState:
    """The same launch under another ladder and another budget; what is under way goes on under them."""
    return replace(state, policy=replace(state.policy, ladder=ladder, restarts=restarts))


def step(state: LaunchState, event: Event) -> tuple[LaunchState, Commands]:
    """What the launch is after the event, and what to do about it, in order.

    After the first failure or stop request nothing starts; a failure that a restart may answer is no first failure. The
    first failure is never replaced. A finished launch takes any event and does nothing. IllegalEventError for an event
    that no driver should send.
    """
    if state.is_finished:
        return state, ()
    _refuse_illegal(state, event)
    state, commands = _react(_note(state, event), event.at_s)
    if state.mode is Mode.STOPPING and not state.ids(set(StageState) - OVER):
        return replace(state, mode=Mode.FINISHED), (*commands, Finished(_result(state)))
    return _wake(state, commands, again=isinstance(event, TimePassed))


def _refuse_illegal(state: LaunchState, event: Event) -> None:
    if isinstance(event, StageEvent):
        stage_state = state.stages.get(event.stage_id)
        failure = getattr(event, "failure", None)
        misattributed = failure is not None and failure.stage_id != event.stage_id
        if stage_state in (None, StageState.PENDING) or misattributed:
            raise IllegalEventError(event, stage_state, state.mode)
    elif isinstance(event, Begin) and state.mode is not Mode.WAITING:
        raise IllegalEventError(event, None, state.mode)


# First half of a step: what the event says about the stages, without any command drawn from it.

_HAS_PROCESS = (StageState.STARTING, StageState.READY, StageState.FAILED)
_BEING_ENDED = (StageState.RETRYING, StageState.RESTARTING, StageState.STOPPING)


def _note(state: LaunchState, event: Event) -> LaunchState:
    match event:
        case Begin():
            return replace(state, mode=Mode.RUNNING)
        case StopRequested(reason):
            reason = state.stop_reason if state.stop_requests else reason
            return replace(state, stop_reason=reason, stop_requests=state.stop_requests + 1)
        case DeadlineExpired(failure) if state.mode is Mode.RUNNING and not state.was_ready:
            return _record(state, failure, stopping=False)
        case TimePassed() | DeadlineExpired():
            return state
        case _:
            return _note_stage(state, event)


def _note_stage(state: LaunchState, event: StageEvent) -> LaunchState:
    """What is not listed came late or twice, and is ignored."""
    stage_id, before = event.stage_id, state.stages[event.stage_id]
    match event, before:
        case StageReady(), StageState.STARTING:
            return _put(state, (stage_id,), StageState.READY)
        case StageNeedsRetry(), _ if state.may_retry(stage_id):
            state = replace(state, retried=state.retried | {stage_id})
            return _send_down(state, StageState.RETRYING, Descent(event.at_s, orderly=False, hurry=True), stage_id)
        case ((StageFailed() | StageNeedsRetry()), (StageState.STARTING | StageState.READY)):
            return _fail(state, event.failure, StageState.FAILED)
        case ((StageFailed() | StageNeedsRetry()), (StageState.RETRYING | StageState.STOPPING)):
            return _record(state, event.failure, stopping=before is StageState.STOPPING)
        case StageEnded(), _ if before in (*_HAS_PROCESS, *_BEING_ENDED):
            return _note_end(_forget_descent(state, stage_id), event, before)
        case RestartRequested(), StageState.READY if state.mode is Mode.RUNNING:
            state = _set_restart(state, stage_id, event.at_s)
            return _send_down(state, StageState.RESTARTING, Descent(event.at_s, orderly=True), stage_id)
        case RestartRequested(), StageState.COOLING if state.mode is Mode.RUNNING:
            return _set_restart(state, stage_id, event.at_s)
        case StageAdmitted(), StageState.ADMITTING:
            state = replace(state, retried=state.retried - {stage_id})
            return _put(state, (stage_id,), StageState.PENDING)
        case StageRefused(), StageState.ADMITTING:
            return _fail(state, event.failure, StageState.ENDED)
        case _:
            return state


def _note_end(state: LaunchState, event: StageEnded, before: StageState) -> LaunchState:
    match before:
        case StageState.RETRYING:
            return _put(state, (event.stage_id,), StageState.PENDING)
        case StageState.RESTARTING:
            return _put(state, (event.stage_id,), StageState.COOLING)
        case StageState.STARTING | StageState.READY:
            unasked = Failure(event.stage_id, "ended without being asked to", event.at_s)
            return _fail(state, event.failure or unasked, StageState.ENDED)
        case _:
            state = _put(state, (event.stage_id,), StageState.ENDED)
            return state if event.failure is None else _record(state, event.failure, stopping=True)


def _fail(state: LaunchState, failure: Failure, otherwise: StageState) -> LaunchState:
    """The stage is started again if it may be; else it is ``otherwise``, and its failure counts."""
    assert failure.stage_id is not None
    stage_id, at_s = failure.stage_id, failure.at_s
    restart_at_s = None if failure.is_final else state.restart_at(stage_id, at_s)
    if restart_at_s is None:
        return _record(_put(state, (stage_id,), otherwise), failure, stopping=False)
    granted = (*state.restarts.get(stage_id, ()), at_s)
    state = _set_restart(replace(state, restarts={**state.restarts, stage_id: granted}), stage_id, restart_at_s)
    if otherwise is StageState.ENDED:
        return _put(state, (stage_id,), StageState.COOLING)
    return _send_down(state, StageState.RESTARTING, Descent(at_s, orderly=False), stage_id)


def _set_restart(state: LaunchState, stage_id: int, at_s: float) -> LaunchState:
    return replace(state, restart_at_s={**state.restart_at_s, stage_id: at_s})


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


def _send_down(state: LaunchState, stage_state: StageState, descent: Descent, stage_id: int) -> LaunchState:
    """Its process is to end; `_climb` commands what is due. A launch of threads has no ladder: threads end alone."""
    if state.policy.on_failure is not OnFailure.DRAIN:
        state = replace(state, descents={**state.descents, stage_id: descent})
    return _put(state, (stage_id,), stage_state)


def _forget_descent(state: LaunchState, stage_id: int) -> LaunchState:
    return replace(state, descents={stage: down for stage, down in state.descents.items() if stage != stage_id})


# Second half: what follows from it.


def _react(state: LaunchState, at_s: float) -> tuple[LaunchState, Commands]:
    commands: Commands = ()
    if not _is_troubled(state) and state.mode is Mode.RUNNING:
        state, commands = _climb(state, at_s)
    if not _is_troubled(state):
        state, more = _start_due(state, at_s) if state.mode is Mode.RUNNING else (state, ())
        return state, commands + more
    began = state.mode is not Mode.STOPPING
    state = replace(_give_up_pending(state), mode=Mode.STOPPING)
    if state.policy.on_failure is OnFailure.DRAIN:
        return _drain(state)
    state, more = _climb(_stop_all(state, at_s) if began else _hurry(state), at_s)
    return state, commands + more


def _is_troubled(state: LaunchState) -> bool:
    return state.first_failure is not None or state.stop_requests > 0


_WAITING = (StageState.PENDING, StageState.COOLING, StageState.ADMITTING)


def _give_up_pending(state: LaunchState) -> LaunchState:
    """What waits to be started never will be; a stage between two of its lives has ended."""
    waiting = state.ids(_WAITING)
    state = _put(state, waiting, StageState.SKIPPED)
    return _put(state, state.begun.intersection(waiting), StageState.ENDED)


def _start_due(state: LaunchState, at_s: float) -> tuple[LaunchState, Commands]:
    """Start whatever order, the limit on running groups and the time of restarts allow now."""
    begun = [group for group in state.policy.groups if _count(state, group, StageState.PENDING) < len(group)]
    running = [group for group in begun if _count(state, group, StageState.READY) < len(group)]
    fresh = [group for group in state.policy.groups if _count(state, group, StageState.PENDING) == len(group)]
    limit = state.policy.max_running_groups
    room = len(fresh) if limit is None else limit - len(running)
    due = [stage for group in (*running, *fresh[:room]) for stage in _next_of(state, group)]
    again = [stage for stage in state.ids({StageState.COOLING}) if state.restart_at_s[stage] <= at_s]
    state = _put(_put(state, due, StageState.STARTING), again, StageState.ADMITTING)
    state = replace(state, was_ready=state.was_ready or state.is_ready, begun=state.begun.union(due))
    return state, (*map(StartStage, due), *map(AdmitStage, again))


def _next_of(state: LaunchState, group: tuple[int, ...]) -> tuple[int, ...]:
    pending = tuple(stage for stage in group if state.stages[stage] is StageState.PENDING)
    if state.policy.order is Order.OVERLAP:
        return pending
    return () if _count(state, group, StageState.STARTING, StageState.RETRYING) else pending[:1]


def _count(state: LaunchState, group: tuple[int, ...], *wanted: StageState) -> int:
    return sum(state.stages[stage] in wanted for stage in group)


def _drain(state: LaunchState) -> tuple[LaunchState, Commands]:
    """Once nothing is starting any more, ask what is ready, the last started first."""
    if state.ids({StageState.STARTING, StageState.RETRYING}):
        return state, ()
    ready = state.ids({StageState.READY})
    return _put(state, ready, StageState.STOPPING), tuple(map(AskStage, reversed(ready)))


def _stop_all(state: LaunchState, at_s: float) -> LaunchState:
    """Everything that runs is sent down, from now on; what is on its way down already goes on from where it is."""
    for stage_id in state.ids(_HAS_PROCESS):
        orderly = state.stages[stage_id] is StageState.READY
        state = _send_down(state, StageState.STOPPING, Descent(at_s, orderly), stage_id)
    return _hurry(_put(state, state.ids({StageState.RETRYING, StageState.RESTARTING}), StageState.STOPPING))


def _hurry(state: LaunchState) -> LaunchState:
    """A second request to stop means now."""
    if state.stop_requests < 2:
        return state
    return replace(state, descents={stage: replace(down, hurry=True) for stage, down in state.descents.items()})


_COMMANDS: dict[Rung, Callable[[int], Command]] = {
    Rung.ASKED: AskStage,
    Rung.TERMED: TerminateStage,
    Rung.KILLED: KillStage,
}


def _climb(state: LaunchState, at_s: float) -> tuple[LaunchState, Commands]:
    """Every rung that is due, of every stage on its way down: first all that are asked, then TERM, then KILL."""
    steps: list[tuple[Rung, int]] = []
    for stage_id, descent in state.descents.items():
        descent, taken = descent.advance(state.policy.ladder, at_s)
        state = replace(state, descents={**state.descents, stage_id: descent})
        steps += [(rung, stage_id) for rung in taken]
    for stage_id in [stage_id for rung, stage_id in steps if rung is Rung.GIVEN_UP]:
        state = _abandon(state, stage_id, at_s)
    order = {stage_id: place for place, stage_id in enumerate(state.stages)}
    steps.sort(key=lambda step: (step[0], order[step[1]]))
    return state, tuple(_COMMANDS[rung](stage_id) for rung, stage_id in steps if rung in _COMMANDS)


def _abandon(state: LaunchState, stage_id: int, at_s: float) -> LaunchState:
    state = _put(_forget_descent(state, stage_id), (stage_id,), StageState.ABANDONED)
    if state.mode is Mode.STOPPING:
        return state
    # It was to be started again; beside what is left of it that cannot be.
    return _record(state, Failure(stage_id, "its process survived SIGKILL", at_s), stopping=False)


def _wake(state: LaunchState, commands: Commands, *, again: bool) -> tuple[LaunchState, Commands]:
    """Add a WakeAt for what is due next if it is a new time, or ``again`` because a timer fired early."""
    times = [descent.next_at_s(state.policy.ladder) for descent in state.descents.values()]
    times += [state.restart_at_s[stage] for stage in state.ids({StageState.COOLING})]
    wake_at_s = min(times, default=None)
    if wake_at_s is None or (wake_at_s == state.wake_at_s and not again):
        return replace(state, wake_at_s=wake_at_s), commands
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
