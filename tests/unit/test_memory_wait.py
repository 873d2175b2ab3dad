import pickle

from stagelaunch.core.errors import DoesNotFitNowError
from stagelaunch.core.memory_wait import MemoryWait, gave_up, hear

A, B = frozenset({"pid 1"}), frozenset({"pid 1", "pid 2"})


def test_who_is_in_the_way_is_said_at_first_and_on_change_and_the_time_left_at_times():
    wait = MemoryWait(60, 160)
    wait, said = hear(wait, 100, ("short by 5",), A)
    assert said == ("does not fit now: waiting for device memory for up to 1m00s", "short by 5")
    # Amounts change with every poll: not a word for that.
    wait, said = hear(wait, 101, ("short by 4",), A)
    assert said == ()
    wait, said = hear(wait, 103, ("short by 7",), B)
    assert said == ("still waiting for device memory, 57.00s left; others hold or claim it now", "short by 7")
    wait, said = hear(wait, 112.9, ("short by 7",), B)
    assert said == ()
    wait, said = hear(wait, 113, ("short by 7",), B)
    assert said == ("still waiting for device memory, 47.00s left",)
    wait, said = hear(wait, 123, ("short by 6",), B)
    assert said == ("still waiting for device memory, 37.00s left", "short by 6")
    assert (wait.left_s(159), wait.left_s(161)) == (1, 0)


def test_the_end_names_the_time_and_what_is_in_the_way():
    assert gave_up(MemoryWait(1.5, 0), "omni", ("short",)) == (
        "cannot admit deployment omni: device memory did not become free within 1.50s; "
        "stop who holds it, or wait longer",
        "short",
    )


def test_who_is_in_the_way_survives_pickling():
    copy = pickle.loads(pickle.dumps(DoesNotFitNowError(("short",), A)))
    assert (copy.findings, copy.in_the_way, str(copy)) == (("short",), A, "short")
