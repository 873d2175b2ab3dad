"""The promises of `core.launch` over event sequences: any order, any interleaving, duplicates and late events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stagelaunch.core.launch import (
    OVER,
    AdmitStage,
    AskStage,
    Begin,
    DeadlineExpired,
    Failure,
    Finished,
    IllegalEventError,
    KillStage,
    LaunchPolicy,
    Mode,
    OnFailure,
    Order,
    RestartRequested,
    StageAdmitted,
    StageEnded,
    StageFailed,
    StageNeedsRetry,
    StageReady,
    StageRefused,
    StageState,
    StartStage,
    StopLadder,
    StopRequested,
    TerminateStage,
    TimePassed,
    WakeAt,
    initial_state,
    step,
)
from stagelaunch.core.restarts import RestartBudget

STAGES = range(6)
_S = StageState
ORDER_OF_STATES = {
    _S.PENDING: {_S.STARTING, _S.SKIPPED, _S.ENDED},
    _S.STARTING: {_S.READY, _S.FAILED, _S.ENDED, _S.STOPPING, _S.RETRYING, _S.RESTARTING, _S.COOLING},
    _S.RETRYING: {_S.PENDING, _S.STARTING, _S.FAILED, _S.ENDED, _S.STOPPING, _S.ABANDONED},
    _S.READY: {_S.FAILED, _S.ENDED, _S.STOPPING, _S.RESTARTING, _S.COOLING},
    _S.RESTARTING: {_S.COOLING, _S.STOPPING, _S.ABANDONED},
    _S.COOLING: {_S.ADMITTING, _S.ENDED},
    _S.ADMITTING: {_S.PENDING, _S.COOLING, _S.ENDED},
    _S.FAILED: {_S.ENDED, _S.STOPPING},
    _S.STOPPING: {_S.ENDED, _S.ABANDONED},
}
BUSY = {_S.STARTING, _S.RETRYING, _S.RESTARTING, _S.COOLING, _S.ADMITTING}


@st.composite
def policies(draw):
    where = draw(st.lists(st.integers(0, 3), min_size=1, max_size=len(STAGES)))
    groups = tuple(tuple(s for s, group in enumerate(where) if group == g) for g in sorted(set(where)))
    times = sorted(draw(st.tuples(*[st.integers(0, 6)] * 3)))
    restarts = st.builds(RestartBudget, st.integers(0, 3), st.just(20.0), st.integers(0, 2), st.just(3.0))
    return LaunchPolicy(
        groups,
        draw(st.sampled_from(Order)),
        draw(st.none() | st.integers(1, 3)),
        on_failure := draw(st.sampled_from(OnFailure)),
        StopLadder(*times, draw(st.integers(0, 6))),
        draw(st.none() | restarts) if on_failure is OnFailure.STOP else None,
    )


ACTIONS = st.tuples(
    st.sampled_from(
        [
            "ready",
            "ready",
            "ready",
            "failed",
            "retry",
            "retry",
            "ended",
            "endedbadly",
            "stop",
            "deadline",
            "time",
            "restart",
            "admitted",
            "admitted",
            "refused",
            "time",
        ]
    ),
    st.sampled_from(STAGES),
    st.sampled_from([0, 0, 0.5, 1, 3]),
)


def event_of(what, stage, at_s):
    failure = Failure(stage, f"{what} at {at_s}", at_s)
    return {
        "ready": StageReady(stage, at_s),
        "failed": StageFailed(stage, failure, at_s),
        "retry": StageNeedsRetry(stage, failure, at_s),
        "restart": RestartRequested(stage, at_s),
        "admitted": StageAdmitted(stage, at_s),
        "refused": StageRefused(stage, failure, at_s),
        "ended": StageEnded(stage, None, at_s),
        "endedbadly": StageEnded(stage, failure, at_s),
        "stop": StopRequested(at_s, at_s),
        "deadline": DeadlineExpired(Failure(None, "boot deadline", at_s), at_s),
        "time": TimePassed(at_s),
    }[what]


class Watched:
    """A launch that checks every promise on every step, against its own history and not the state's."""

    def __init__(self, policy):
        self.policy = policy
        self.state = initial_state(policy)
        self.commands = []
        self.trouble = False
        self.first_failure = None
        self.now_s = 0.0

    def send(self, event):
        before = self.state
        try:
            self.state, commands = step(before, event)
        except IllegalEventError:
            assert before.stages.get(getattr(event, "stage_id", None)) in (None, StageState.PENDING)
            return
        assert step(before, event) == (self.state, commands), "step is a function"
        self._check_transitions(before)
        self._check_failures()
        self._check_starts(commands)
        if before.is_finished:
            assert (self.state, commands) == (before, ())
        self.commands += commands
        self._check_ladder()

    def _check_transitions(self, before):
        for stage, state in self.state.stages.items():
            was = before.stages[stage]
            allowed = ORDER_OF_STATES.get(was, set())
            allowed = allowed | {after for via in allowed for after in ORDER_OF_STATES.get(via, ())}
            assert state is was or state in allowed, (was, state)

    def _check_failures(self):
        if self.first_failure is not None:
            assert self.state.first_failure is self.first_failure, "the first failure is never replaced"
        self.first_failure = self.state.first_failure
        failed = [kept.stage_id for kept in self.state.consequences]
        assert len(failed) == len(set(failed))
        self.trouble |= self.first_failure is not None or self.state.stop_requests > 0
        assert self.trouble == (self.state.mode in (Mode.STOPPING, Mode.FINISHED))

    def _check_starts(self, commands):
        started = [command.stage_id for command in commands if isinstance(command, StartStage | AdmitStage)]
        assert not (started and self.trouble), "nothing starts after the first failure"
        budget = self.policy.restarts
        for stage, granted in self.state.restarts.items():
            recent = [at_s for at_s in granted if granted[-1] - at_s < budget.within_s]
            assert len(recent) <= budget.max_restarts, "no more restarts than allowed"
            assert self.state.was_ready, "a boot that fails is not restarted"
            assert self.state.restart_at_s[stage] >= granted[-1]
        if self.state.mode is not Mode.RUNNING:
            return
        running = 0
        for group in self.policy.groups:
            states = [self.state.stages[stage] for stage in group]
            running += any(s is not StageState.PENDING for s in states) and set(states) != {StageState.READY}
            if self.policy.order is Order.SERIAL and not self.state.was_ready:
                assert states.count(StageState.STARTING) + states.count(StageState.RETRYING) <= 1
                begun = [s is not StageState.PENDING for s in states]
                assert begun == sorted(begun, reverse=True), "by id"
        limit = self.policy.max_running_groups
        assert limit is None or running <= limit or self.state.was_ready
        # Progress: unless all is ready, something is starting, or about to be.
        assert self.state.is_ready or self.state.ids(BUSY)

    def _check_ladder(self):
        # Between two starts of a stage each rung is commanded once, and in order.
        rungs = {}
        for command in self.commands:
            match command:
                case StartStage(stage):
                    assert rungs.get(stage) is None or rungs[stage] >= 0
                    rungs[stage] = 0
                case AskStage(stage) | TerminateStage(stage) | KillStage(stage):
                    rung = (AskStage, TerminateStage, KillStage).index(type(command)) + 1
                    assert rungs[stage] < rung, "down the ladder, and only for what was started"
                    assert rung < 3 or rungs[stage] == 2, "TERM before KILL"
                    rungs[stage] = rung
        assert sum(isinstance(command, Finished) for command in self.commands) == self.state.is_finished
        if self.policy.on_failure is OnFailure.DRAIN:
            assert not any(isinstance(c, TerminateStage | KillStage | WakeAt) for c in self.commands)

    def finish(self, ending):
        """What a real driver does next: whatever was started ends, or nothing does and only time passes."""
        self.send(StopRequested("the end", self.now_s))
        for stage in ending:
            self.send(StageEnded(stage, None, self.now_s))
        for _ in range(8):
            wakes = [command.at_s for command in self.commands if isinstance(command, WakeAt)]
            if self.state.is_finished or not wakes:
                break
            self.now_s = max(self.now_s, wakes[-1])
            self.send(TimePassed(self.now_s))
        if self.policy.on_failure is OnFailure.DRAIN:
            # A thread that is starting ends first; that is what lets the ready ones be asked.
            for wanted in (StageState.STARTING, StageState.RETRYING, StageState.FAILED, StageState.STOPPING):
                for stage in self.state.ids({wanted}):
                    self.send(StageEnded(stage, None, self.now_s))


@settings(max_examples=250, deadline=None)
@given(policies(), st.lists(ACTIONS, max_size=25), st.sets(st.sampled_from(STAGES)), st.booleans())
def test_every_promise_holds_in_any_sequence_of_events(policy, actions, ending, begun):
    launch = Watched(policy)
    if begun:
        launch.send(Begin(0))
    for what, stage, later_s in actions:
        launch.now_s += later_s
        launch.send(event_of(what, stage, launch.now_s))
    launch.finish(ending)

    assert launch.state.is_finished
    result = launch.commands[-1].result
    started = {command.stage_id for command in launch.commands if isinstance(command, StartStage)}
    over = (*result.ended, *result.abandoned)
    assert sorted(over) == sorted(started), "every started stage is over exactly once"
    assert set(result.skipped) == set(launch.state.stages) - started
    assert set(launch.state.stages.values()) <= OVER
    if result.abandoned:
        assert {KillStage(stage) for stage in result.abandoned} <= set(launch.commands)


@settings(max_examples=80, deadline=None)
@given(policies(), st.randoms(use_true_random=False))
def test_without_a_failure_every_stage_becomes_ready(policy, random):
    launch = Watched(policy)
    launch.send(Begin(0))
    while not launch.state.is_ready:
        starting = launch.state.ids({StageState.STARTING})
        launch.send(StageReady(random.choice(starting), 0))
    assert launch.state.was_ready
    assert len(launch.commands) == len(launch.state.stages)


@settings(max_examples=80, deadline=None)
@given(policies(), st.data())
def test_draining_asks_exactly_what_succeeded_and_only_when_nothing_starts(policy, data):
    launch = Watched(LaunchPolicy(policy.groups, policy.order, policy.max_running_groups, OnFailure.DRAIN))
    launch.send(Begin(0))
    succeeded = set()
    while starting := launch.state.ids({StageState.STARTING}):
        assert not any(isinstance(command, AskStage) for command in launch.commands)
        stage = data.draw(st.sampled_from(starting))
        if data.draw(st.booleans()):
            succeeded.add(stage)
            launch.send(StageReady(stage, 0))
        else:
            launch.send(StageEnded(stage, Failure(stage, "no", 0), 0))
    asked = {command.stage_id for command in launch.commands if isinstance(command, AskStage)}
    assert asked == (set() if launch.state.is_ready else succeeded)
