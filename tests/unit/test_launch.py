"""Event histories as data: what each event makes the brain command."""

import pickle
from dataclasses import replace

import pytest

from stagelaunch.core.launch import (
    AdmitStage,
    AskStage,
    Begin,
    DeadlineExpired,
    Failure,
    Finished,
    IllegalEventError,
    KillStage,
    LaunchPolicy,
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

GROUPS = ((0,), (1, 2))
LADDER = StopLadder(term_after_s=1, kill_after_s=2, give_up_after_s=3)


def policy(order=Order.OVERLAP, on_failure=OnFailure.STOP, groups=GROUPS, at_most=None, restarts=None, ladder=LADDER):
    return LaunchPolicy(groups, order, at_most, on_failure, ladder, restarts)


def play(launch_policy, *events):
    """The last state, and the commands each event brought."""
    state, heard = initial_state(launch_policy), []
    for event in events:
        state, commands = step(state, event)
        heard.append(list(commands))
    return state, heard


def oom(stage, at_s=0.0):
    return Failure(stage, "out of memory", at_s)


def result_of(commands):
    (finished,) = [command for command in commands if isinstance(command, Finished)]
    assert commands[-1] is finished
    return finished.result


ALL_READY = [Begin(0), StageReady(0, 0), StageReady(1, 0), StageReady(2, 0)]


def test_overlap_starts_all_stages_at_once():
    state, heard = play(policy(), *ALL_READY)
    assert heard == [[StartStage(0), StartStage(1), StartStage(2)], [], [], []]
    assert state.is_ready
    assert state.was_ready
    assert not state.is_finished


def test_serial_starts_the_next_of_a_group_when_the_one_before_is_ready():
    _, heard = play(policy(Order.SERIAL), Begin(0), StageReady(0, 1), StageReady(1, 2), StageReady(2, 3))
    assert heard == [[StartStage(0), StartStage(1)], [], [StartStage(2)], []]


def test_a_limit_on_groups_holds_the_others_back_until_one_is_complete():
    limited = policy(Order.SERIAL, groups=((0, 1), (2,), (3,)), at_most=1)
    events = [Begin(0), *(StageReady(stage, 0) for stage in range(4))]
    _, heard = play(limited, *events)
    assert heard == [[StartStage(0)], [StartStage(1)], [StartStage(2)], [StartStage(3)], []]


def test_no_stage_at_all_is_ready_at_once():
    state, heard = play(policy(groups=()), Begin(0))
    assert state.is_ready
    assert heard == [[]]


def test_a_failure_stops_everything_down_the_ladder_and_names_what_survives():
    state, heard = play(
        policy(groups=((0,), (1,), (2,), (3, 4)), order=Order.SERIAL),
        Begin(0),
        StageReady(0, 1),
        StageFailed(1, oom(1), 10),
        TimePassed(11),
        StageEnded(1, oom(1), 11.5),
        TimePassed(12),
        StageEnded(2, None, 12.5),
        TimePassed(13),
    )
    assert heard[2:] == [
        [AskStage(0), TerminateStage(1), TerminateStage(2), TerminateStage(3), WakeAt(11)],
        [TerminateStage(0), WakeAt(12)],
        [],
        [KillStage(0), KillStage(2), KillStage(3), WakeAt(13)],
        [],
        heard[-1],
    ]
    result = result_of(heard[-1])
    assert result.first_failure == oom(1)
    assert result.consequences == ()
    assert (result.ended, result.skipped, result.abandoned) == ((1, 2), (4,), (0, 3))
    assert not result.was_ready
    assert state.is_finished


def test_what_ends_before_its_rung_is_spared_the_rest_of_the_ladder():
    _, heard = play(
        policy(),
        *ALL_READY,
        StopRequested("down", 5),
        StageEnded(0, None, 5.1),
        TimePassed(6),
        StageEnded(1, None, 6.1),
        StageEnded(2, None, 6.2),
    )
    assert heard[4:7] == [
        [AskStage(0), AskStage(1), AskStage(2), WakeAt(6)],
        [],
        [TerminateStage(1), TerminateStage(2), WakeAt(7)],
    ]
    result = result_of(heard[-1])
    assert result.stop_reason == "down"
    assert result.was_ready
    assert result.first_failure is None


def test_a_second_stop_request_means_now():
    _, heard = play(policy(), *ALL_READY[:-1], StopRequested("^C", 5), StopRequested("^C again", 5.2))
    assert heard[-1] == [
        *(TerminateStage(stage) for stage in (0, 1)),
        *(KillStage(stage) for stage in (0, 1, 2)),
        WakeAt(6.2),
    ]


def test_a_stop_request_during_a_roll_back_is_the_first_one():
    state, heard = play(policy(), Begin(0), StageFailed(0, oom(0), 1), StopRequested("^C", 1.1))
    assert heard[-1] == []
    assert state.stop_reason == "^C"


def test_a_driver_that_was_held_up_still_leaves_time_to_die():
    state, heard = play(policy(), Begin(0), StopRequested("down", 1), TimePassed(100), TimePassed(100.5))
    assert heard[2][-1] == WakeAt(101)
    assert heard[3] == [WakeAt(101)]
    state, commands = step(state, TimePassed(101))
    assert result_of(commands).abandoned == (0, 1, 2)


def test_a_timer_that_fires_early_is_set_again():
    _, heard = play(policy(), Begin(0), StopRequested("down", 0.1), TimePassed(2.0999))
    assert heard[-1] == [WakeAt(0.1 + 2)]


def test_a_stage_that_ends_by_itself_is_a_failure_also_after_the_boot():
    state, heard = play(policy(), *ALL_READY, StageEnded(1, None, 60))
    assert state.first_failure == Failure(1, "ended without being asked to", 60)
    assert heard[-1] == [AskStage(0), AskStage(2), WakeAt(61)]
    assert state.was_ready
    assert not state.is_ready


def test_later_failures_are_consequences_one_for_a_stage():
    state, _ = play(
        policy(),
        Begin(0),
        StageFailed(1, oom(1), 1),
        StageFailed(0, oom(0), 1.1),
        StageEnded(0, Failure(0, "exit code 1", 1.2), 1.2),
        StageEnded(2, oom(2), 1.3),
    )
    assert state.first_failure == oom(1)
    assert state.consequences == (oom(0), oom(2))


def test_a_failure_while_being_stopped_in_order_is_no_first_failure():
    state, _ = play(policy(), *ALL_READY, StopRequested("down", 5), StageEnded(0, oom(0), 6))
    assert state.first_failure is None
    assert state.consequences == (oom(0),)


def test_the_boot_deadline_is_a_failure_until_all_are_ready():
    late = Failure(None, "boot took longer than 600s; waiting for stage 2", 600)
    state, heard = play(policy(), *ALL_READY[:-1], DeadlineExpired(late, 600))
    assert state.first_failure == late
    assert heard[-1] == [AskStage(0), AskStage(1), TerminateStage(2), WakeAt(601)]
    state, heard = play(policy(), *ALL_READY, DeadlineExpired(late, 600))
    assert state.is_ready
    state, heard = play(policy(), Begin(0), StopRequested("down", 1), DeadlineExpired(late, 1))
    assert state.first_failure is None


def test_draining_lets_starting_stages_finish_then_cleans_up_what_is_ready():
    draining = policy(Order.SERIAL, OnFailure.DRAIN, groups=((0, 1), (2,), (3,)))
    _, heard = play(
        draining,
        Begin(0),
        StageReady(3, 0.5),
        StageFailed(0, oom(0), 1),
        StageReady(2, 9),
        StageEnded(0, None, 9.1),
        StageEnded(2, oom(2), 9.2),
        StageEnded(3, None, 9.3),
    )
    assert heard[2:6] == [[], [AskStage(3), AskStage(2)], [], []]
    result = result_of(heard[-1])
    assert result.first_failure == oom(0)
    assert result.consequences == (oom(2),)
    assert (result.ended, result.skipped) == ((0, 2, 3), (1,))


def test_draining_after_a_stop_request_takes_no_second_one():
    draining = policy(Order.SERIAL, OnFailure.DRAIN, groups=((0, 1),))
    _, heard = play(
        draining, Begin(0), StopRequested("^C", 1), StopRequested("^C", 1), StageReady(0, 2), StageEnded(0, None, 3)
    )
    assert heard[1:4] == [[], [], [AskStage(0)]]
    assert result_of(heard[4]).skipped == (1,)


def test_a_stop_before_the_beginning_starts_nothing():
    _, heard = play(policy(), StopRequested("^C", 0), Begin(0))
    assert result_of(heard[0]).skipped == (0, 1, 2)
    assert heard[1] == []


@pytest.mark.parametrize(
    "event", [Begin(9), StageReady(0, 9), StageReady(77, 9), TimePassed(9), StopRequested("again", 9)]
)
def test_a_finished_launch_absorbs_everything(event):
    state, _ = play(policy(), StopRequested("^C", 0))
    assert step(state, event) == (state, ())


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (StageReady(77, 1), "unknown stage"),
        (StageFailed(2, oom(2), 1), "pending"),
        (StageFailed(1, oom(0), 1), "starting"),
        (Begin(1), "running"),
    ],
)
def test_an_event_that_cannot_be_is_refused_by_name(event, said):
    state, _ = play(policy(Order.SERIAL), Begin(0))
    with pytest.raises(IllegalEventError) as caught:
        step(state, event)
    assert str(event) in str(caught.value)
    assert said in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_late_and_repeated_events_of_a_stage_change_nothing():
    state, _ = play(policy(), Begin(0), StageReady(0, 1), StageFailed(1, oom(1), 2), StageEnded(1, None, 2.1))
    for event in (StageReady(1, 2.5), StageFailed(1, oom(1), 2.5), StageEnded(1, oom(1), 2.5), StageReady(0, 2.5)):
        assert step(state, event) == (state, ())
    assert state.stages[1] is StageState.ENDED


@pytest.mark.parametrize("ladder", [(-1, 2, 3), (3, 2, 4), (1, 5, 4)])
def test_a_ladder_that_descends_is_refused(ladder):
    with pytest.raises(ValueError, match="order term, kill, give up"):
        StopLadder(*ladder)


@pytest.mark.parametrize(("groups", "at_most"), [(((0, 1), (1,)), None), (((0,),), 0)])
def test_a_policy_that_makes_no_sense_is_refused(groups, at_most):
    with pytest.raises(ValueError, match="cannot launch"):
        LaunchPolicy(groups, Order.SERIAL, at_most, OnFailure.STOP)


def retry(stage, at_s=0.0):
    return StageNeedsRetry(stage, oom(stage, at_s), at_s)


def test_a_stage_that_needs_it_is_started_once_more_when_its_process_is_gone():
    state, heard = play(policy(), Begin(0), retry(1), StageEnded(1, None, 1), StageReady(1, 2))
    assert heard[1:] == [[TerminateStage(1), KillStage(1), WakeAt(1)], [StartStage(1)], []]
    assert state.first_failure is None
    assert state.stages == {0: StageState.STARTING, 1: StageState.READY, 2: StageState.STARTING}


def test_the_second_time_it_is_a_failure():
    state, heard = play(policy(), Begin(0), retry(1), StageEnded(1, None, 1), retry(1, 2.0))
    assert state.first_failure == oom(1, 2.0)
    assert TerminateStage(0) in heard[-1]
    assert StartStage(1) not in heard[-1]


def test_in_serial_order_the_next_waits_for_the_second_try():
    events = [Begin(0), StageReady(0, 0), retry(1), StageEnded(1, None, 1), StageReady(1, 2)]
    _, heard = play(policy(Order.SERIAL), *events)
    assert heard[2:] == [[TerminateStage(1), KillStage(1), WakeAt(1)], [StartStage(1)], [StartStage(2)]]


def test_a_ready_stage_gets_no_second_try():
    state, _ = play(policy(), *ALL_READY, retry(1))
    assert state.first_failure == oom(1)


@pytest.mark.parametrize("trouble", [StageFailed(0, oom(0), 0.5), StopRequested("enough", 0.5)])
def test_nothing_is_started_again_once_the_launch_stops(trouble):
    state, heard = play(policy(), Begin(0), retry(1), trouble, StageEnded(1, None, 2))
    assert TerminateStage(1) in heard[1]
    assert TerminateStage(1) not in heard[2]
    assert heard[3] == [WakeAt(2.5)]
    assert state.stages[1] is StageState.ENDED


def test_between_its_two_tries_a_stage_waits_for_its_turn_and_has_ended_if_that_never_comes():
    limited = policy(groups=((0,), (1,)), at_most=1)
    events = [Begin(0), retry(0), StageEnded(0, None, 1), StageFailed(0, oom(0), 2), StageEnded(0, None, 3)]
    _, heard = play(limited, *events)
    assert result_of(heard[-1]).skipped == (1,)
    assert result_of(heard[-1]).ended == (0,)


def test_what_was_still_booting_has_the_shorter_grace():
    ladder = StopLadder(term_after_s=8, kill_after_s=10, give_up_after_s=12, booting_kill_after_s=3)
    _, heard = play(
        policy(ladder=ladder), Begin(0), StageReady(0, 0), StopRequested("enough", 100), TimePassed(103),
        TimePassed(105), TimePassed(108), TimePassed(110), TimePassed(112),
    )  # fmt: skip
    assert heard[2:4] == [
        [AskStage(0), TerminateStage(1), TerminateStage(2), WakeAt(103)],
        [KillStage(1), KillStage(2), WakeAt(105)],
    ]
    assert [TerminateStage(0), WakeAt(110)] in heard
    assert [KillStage(0), WakeAt(112)] in heard
    assert result_of(heard[-1]).abandoned == (0, 1, 2)


RESTARTS = RestartBudget(max_restarts=2, within_s=100, backoff_s=1, backoff_max_s=60)
HEALING = policy(restarts=RESTARTS)


def test_a_stage_that_dies_after_the_boot_is_started_again_alone_after_its_pause_if_it_still_fits():
    state, heard = play(
        HEALING, *ALL_READY, StageEnded(1, oom(1, 10), 10), TimePassed(11), StageAdmitted(1, 11.5), StageReady(1, 12)
    )
    assert heard[4:] == [[WakeAt(11)], [AdmitStage(1)], [StartStage(1)], []]
    assert state.is_ready
    assert state.first_failure is None
    assert state.restarts == {1: (10,)}


def test_one_that_failed_and_is_still_there_is_sent_down_the_ladder_first():
    _, heard = play(HEALING, *ALL_READY, StageFailed(1, oom(1, 10), 10), TimePassed(12), StageEnded(1, None, 12.5))
    assert heard[4:] == [[TerminateStage(1), WakeAt(12)], [KillStage(1), WakeAt(13)], [AdmitStage(1)]]


def test_the_pause_doubles_and_the_failure_after_the_last_restart_stops_all():
    events = []
    for at_s, pause_s in ((10, 1), (20, 2)):
        events += [StageEnded(1, oom(1, at_s), at_s), TimePassed(at_s + pause_s), StageAdmitted(1, at_s + pause_s)]
    state, heard = play(HEALING, *ALL_READY, *events, StageEnded(1, oom(1, 30), 30))
    assert heard[4:-1] == [
        [WakeAt(11)],
        [AdmitStage(1)],
        [StartStage(1)],
        [WakeAt(22)],
        [AdmitStage(1)],
        [StartStage(1)],
    ]
    assert heard[-1] == [AskStage(0), AskStage(2), WakeAt(31)]
    assert state.first_failure == oom(1, 30)


def test_restarts_of_long_ago_do_not_count_and_each_stage_has_its_own():
    events = [StageEnded(1, oom(1, 10), 10), TimePassed(11), StageAdmitted(1, 11), StageReady(1, 12)]
    later = [StageEnded(1, oom(1, 200), 200), StageEnded(2, oom(2, 200), 200)]
    _, heard = play(HEALING, *ALL_READY, *events, *later)
    assert heard[-2] == [WakeAt(201)]
    assert heard[-1] == []


def test_a_restart_that_does_not_fit_counts_as_one_that_failed():
    events = [StageEnded(1, oom(1, 10), 10), TimePassed(11), StageRefused(1, oom(1, 11), 11), TimePassed(13)]
    state, heard = play(HEALING, *ALL_READY, *events, StageRefused(1, oom(1, 14), 14))
    assert heard[6:8] == [[WakeAt(13)], [AdmitStage(1)]]
    assert state.first_failure == oom(1, 14)
    assert state.stages[1] is StageState.ENDED


def test_what_would_only_fail_again_is_not_restarted():
    final = replace(oom(1, 10), is_final=True)
    state, heard = play(HEALING, *ALL_READY, StageFailed(1, final, 10))
    assert heard[-1] == [AskStage(0), AskStage(2), TerminateStage(1), WakeAt(11)]
    assert (state.first_failure, state.restarts) == (final, {})


def test_a_boot_that_fails_is_not_restarted():
    state, _ = play(HEALING, Begin(0), StageReady(0, 1), StageEnded(0, oom(0, 2), 2))
    assert state.first_failure == oom(0, 2)


def test_a_stage_to_be_restarted_that_survives_the_kill_stops_all_and_is_named():
    events = [StageFailed(1, oom(1, 10), 10), TimePassed(12), TimePassed(13)]
    state, heard = play(HEALING, *ALL_READY, *events, StageEnded(0, None, 14), StageEnded(2, None, 14))
    assert heard[-3] == [AskStage(0), AskStage(2), WakeAt(14)]
    assert state.first_failure == Failure(1, "its process survived SIGKILL", 13)
    assert result_of(heard[-1]).abandoned == (1,)


def test_a_restart_that_is_asked_for_is_orderly_at_once_and_not_counted():
    events = [RestartRequested(1, 10), StageEnded(1, None, 10.5), StageAdmitted(1, 10.6), StageReady(1, 12)]
    state, heard = play(policy(), *ALL_READY, *events)
    assert heard[4:] == [[AskStage(1), WakeAt(11)], [AdmitStage(1)], [StartStage(1)], []]
    assert state.restarts == {}


@pytest.mark.parametrize("trouble", [StopRequested("enough", 10.5), StageEnded(0, oom(0, 10.5), 10.5)])
def test_a_stop_ends_a_restart_wherever_it_is(trouble):
    stopping = policy()
    for done in range(4):
        events = [RestartRequested(1, 10), StageEnded(1, None, 10.2), StageAdmitted(1, 10.3)][:done]
        state, heard = play(stopping, *ALL_READY, *events, trouble)
        assert not any(isinstance(command, StartStage | AdmitStage) for command in heard[-1])
        ended = state.stages[1] is StageState.ENDED
        assert ended == (done == 2)
        assert (TerminateStage(1) in heard[-1]) == (done == 3)


def test_a_kill_has_its_step_before_the_stage_is_given_up_even_without_time_between() -> None:
    hasty = policy(ladder=StopLadder(0, 0, 0, 0), groups=((0,),))
    _, heard = play(hasty, Begin(0), StopRequested("enough", 1), TimePassed(1))
    assert heard[1] == [TerminateStage(0), KillStage(0), WakeAt(1)]
    assert result_of(heard[2]).abandoned == (0,)


def test_a_restart_asked_for_while_threads_drain_comes_too_late():
    events = [Begin(0), StageReady(0, 0), StopRequested("enough", 1)]
    state, heard = play(policy(on_failure=OnFailure.DRAIN), *events, RestartRequested(0, 2))
    assert heard[-1] == []
    assert state.stages[0] is StageState.READY


def test_a_stage_that_is_started_again_has_its_second_try_again():
    again = [RestartRequested(1, 10), StageEnded(1, None, 10), StageAdmitted(1, 10)]
    first_try = [Begin(0), retry(1), StageEnded(1, None, 0), StageReady(0, 0), StageReady(1, 0), StageReady(2, 0)]
    state, heard = play(policy(), *first_try, *again, retry(1, 11), StageEnded(1, None, 12))
    assert heard[-1] == [StartStage(1)]
    assert state.first_failure is None
