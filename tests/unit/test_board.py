"""What is known of a stage, from its messages alone."""

from __future__ import annotations

from dataclasses import replace

from stagelaunch.core import board
from stagelaunch.core import messages as m
from stagelaunch.core.board import LOCK_SLACK_S, StageView, Timeouts
from stagelaunch.core.narrate import narrate
from stagelaunch.core.phases import LockMode, Phase

LIMITS = Timeouts(phase_s=10, stage_s=30, boot_s=60, lock_s=20, heartbeat_s=1000)


def fold(*messages: m.Message) -> StageView:
    view = board.spawned(0, "talker", 100.0)
    for message in messages:
        view = board.apply(view, message)
    return view


def test_spans_tell_every_phase_and_its_lock_wait() -> None:
    view = fold(
        m.PhaseBegan(Phase.IMPORT, 101.0),
        m.PhaseEnded(Phase.IMPORT, 104.0, 0.0),
        m.PhaseBegan(Phase.CONTEXT, 104.0),
        m.LockWaits(Phase.CONTEXT, LockMode.EXCLUSIVE, ("pid 1",), 104.1),
        m.LockTaken(Phase.CONTEXT, LockMode.EXCLUSIVE, 2.0, 106.0),
        m.PhaseEnded(Phase.CONTEXT, 107.0, 2.0),
    )
    assert [(span.phase, span.ended_s - span.began_s, span.waited_s) for span in view.spans] == [
        (Phase.SPAWN, 1.0, 0.0),
        (Phase.IMPORT, 3.0, 0.0),
        (Phase.CONTEXT, 3.0, 2.0),
    ]


def deadline(view: StageView) -> float:
    due = board.next_deadline(view, LIMITS)
    assert due is not None
    return due.at_s


def test_phase_deadline_counts_work_and_not_waiting() -> None:
    view = fold(m.PhaseBegan(Phase.PROFILE, 105.0))
    assert deadline(view) == 115.0
    view = board.apply(view, m.LockWaits(Phase.PROFILE, LockMode.EXCLUSIVE, ("pid 7",), 105.0))
    view = board.apply(view, m.LockTaken(Phase.PROFILE, LockMode.EXCLUSIVE, 4.0, 109.0))
    assert deadline(view) == 119.0


def test_while_waiting_the_lock_deadline_counts_from_the_first_word_of_it() -> None:
    view = fold(m.PhaseBegan(Phase.PROFILE, 101.0), m.LockWaits(Phase.PROFILE, LockMode.EXCLUSIVE, ("pid 7",), 101.0))
    view = board.apply(view, m.LockWaits(Phase.PROFILE, LockMode.EXCLUSIVE, ("pid 8",), 103.0))
    due = board.next_deadline(view, LIMITS)
    assert due is not None
    assert due.at_s == 101.0 + 20 + LOCK_SLACK_S
    assert "held by pid 8" in due.text


def test_stage_deadline_is_the_outer_bound() -> None:
    assert deadline(fold(m.PhaseBegan(Phase.CAPTURE, 125.0))) == 130.0


def test_a_ready_or_stopping_stage_has_no_boot_deadline() -> None:
    ready = fold(m.PhaseBegan(Phase.CAPTURE, 101.0), m.Ready(102.0))
    assert board.next_deadline(board.stopping(ready, 103.0), LIMITS) is None


def test_each_transition_is_one_line_and_repeats_are_none() -> None:
    before = fold(m.PhaseBegan(Phase.PROFILE, 101.0))
    waits = m.LockWaits(Phase.PROFILE, LockMode.EXCLUSIVE, ("pid 7 (x)",), 101.0)
    after = board.apply(before, waits)
    assert narrate(before, after, waits) == ("profile waits for the exclusive device lock, held by pid 7 (x)",)
    assert narrate(after, board.apply(after, waits), waits) == ()
    half = m.Progress(Phase.LOAD, 1, 2, "bytes", 101.0)
    assert narrate(after, after, half) == ()
    assert narrate(after, after, replace(half, done=2)) == ("load 100 % (2 B)",)


def test_a_stage_that_computes_or_serves_must_answer_and_one_that_imports_cannot() -> None:
    limits = replace(LIMITS, heartbeat_s=3)
    view = board.heard(fold(m.PhaseBegan(Phase.IMPORT, 101.0)), 101.0)
    assert board.next_deadline(view, limits) == board.next_deadline(view, LIMITS)
    for message in (m.PhaseBegan(Phase.LOAD, 102.0), m.Ready(103.0)):
        view = board.heard(board.apply(view, message), 102.5)
        due = board.next_deadline(view, limits)
        assert due is not None
        assert (due.at_s, due.kind) == (105.5, "heartbeat")
