"""What counts as getting on, and how a boot is told in one line."""

from __future__ import annotations

import pytest

from stagelaunch.core import board
from stagelaunch.core import messages as m
from stagelaunch.core.board import StageView
from stagelaunch.core.config import Timeouts
from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.core.service_status import (
    booting_text,
    one_line,
    progress_of,
    quiet_bound_s,
    ready_text,
    stop_bound_s,
    waits_for_others,
)

LOAD = m.PhaseBegan(Phase.LOAD, 102.0)
WAITS = m.LockWaits(Phase.LOAD, LockMode.SHARED, ("pid 7",), 103.0)
TAKEN = m.LockTaken(Phase.LOAD, LockMode.SHARED, 4.0, 107.0)


def fold(name: str, *messages: m.Message) -> StageView:
    view = board.spawned(0, name, 100.0)
    for message in messages:
        view = board.apply(view, message)
    return view


def moved(done: int) -> m.Message:
    return m.Progress(Phase.LOAD, done, 100, "bytes", 104.0)


@pytest.mark.parametrize(
    ("before", "message", "is_progress"),
    [
        ((), m.PhaseBegan(Phase.IMPORT, 101.0), True),
        ((LOAD,), moved(1), True),
        ((LOAD, moved(1)), moved(2), True),
        ((LOAD, moved(2)), moved(2), False),
        ((LOAD,), WAITS, False),
        ((LOAD, WAITS), TAKEN, True),
        ((LOAD,), m.Ready(110.0), True),
        ((LOAD,), m.Pong(1), False),
    ],
)
def test_progress_is_what_got_done(before: tuple[m.Message, ...], message: m.Message, is_progress: bool) -> None:
    views = {0: fold("thinker", *before), 1: None}
    after = {0: board.apply(views[0], message), 1: None}
    assert (progress_of(views) != progress_of(after)) is is_progress


def test_a_wait_counts_while_all_that_boot_wait_and_only_until_their_lock_deadline() -> None:
    waiting, working, ready = fold("a", LOAD, WAITS), fold("b", LOAD), fold("c", LOAD, m.Ready(105.0))
    assert waits_for_others({0: waiting, 1: ready, 2: None}, 20.0, 127.9)
    assert not waits_for_others({0: waiting, 1: ready}, 20.0, 128.1)
    # One of ours works, perhaps with the lock: its own movement decides.
    assert not waits_for_others({0: waiting, 1: working}, 20.0, 110.0)
    assert not waits_for_others({0: ready, 1: None}, 20.0, 110.0)


def test_the_status_names_the_stage_that_is_furthest_behind() -> None:
    views = {
        0: fold("thinker", LOAD, moved(43)),
        1: fold("talker", m.PhaseBegan(Phase.PROFILE, 110.0)),
        2: fold("code2wav", LOAD, m.Ready(105.0)),
    }
    assert booting_text(views, 114.2) == "booting: 1 of 3 ready; thinker: load 43 %, 12s"
    later = {**views, 0: fold("thinker", LOAD, moved(50)), 3: fold("other", LOAD, moved(7))}
    assert booting_text(later, 182.0).endswith("other: load 7 %, 1m20s")
    assert booting_text({0: fold("thinker", LOAD, WAITS)}, 113.0) == (
        "booting: 0 of 1 ready; thinker: load waits for the device lock, 10s"
    )
    assert booting_text({0: None}, 1.0) == "booting: 0 of 1 ready"
    assert (ready_text({0: None}), ready_text(views)) == ("ready: 1 stage", "ready: 3 stages")


def test_a_status_is_one_printable_line() -> None:
    assert one_line("a\nb\x1bc") == "a b c"
    assert len(one_line("x" * 1000)) == 250


def test_bounds_are_wider_than_our_own_deadlines() -> None:
    limits = Timeouts(phase="20s", lock="40s", stage="60s", stop="5s", memory="7s", driver="9s")
    assert quiet_bound_s(limits) > 40 + board.LOCK_SLACK_S
    assert quiet_bound_s(limits.model_copy(update={"phase_s": 55.0})) > 55
    assert quiet_bound_s(limits.model_copy(update={"driver_s": 99.0})) > 99
    assert stop_bound_s(limits) > 5 + 10 + 7 + 9
