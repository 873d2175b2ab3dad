"""How an end becomes an exit code and a text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagelaunch.core.errors import ExitCode
from stagelaunch.core.failure import StageFailure, exited, render
from stagelaunch.core.inventory import DeviceInfo, DeviceProcess
from stagelaunch.core.outcome import Outcome, memory_leftovers
from stagelaunch.core.phases import Phase

TOLERANCE_BYTES = 64 << 20
FAILURE = StageFailure("talker", Phase.LOAD, "OSError", "cannot read x: gone\nsecond line", 1.5)
GOOD = Outcome(None, (), was_ready=True, interrupted=False, leftovers=())


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (GOOD, ExitCode.OK),
        (replace(GOOD, interrupted=True), ExitCode.INTERRUPTED),
        (replace(GOOD, was_ready=False), ExitCode.INTERRUPTED),
        (replace(GOOD, first=FAILURE), ExitCode.STAGE_FAILED),
        (replace(GOOD, first=FAILURE, interrupted=True), ExitCode.STAGE_FAILED),
        (replace(GOOD, first=replace(FAILURE, exit_code=ExitCode.TEMPORARY)), ExitCode.TEMPORARY),
        (replace(GOOD, first=FAILURE, leftovers=("x",)), ExitCode.CLEANUP_INCOMPLETE),
    ],
)
def test_exit_code(outcome: Outcome, code: ExitCode) -> None:
    assert outcome.exit_code is code


def device(free: int, *processes: DeviceProcess) -> dict[int, DeviceInfo]:
    return {0: DeviceInfo(0, "GPU-0", "x", 10 << 30, free, processes)}


NEIGHBOUR = DeviceProcess(7, "other", 1 << 30)
OURS = DeviceProcess(9, "ours", 1 << 20)


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        (device(5 << 30), device(5 << 30), 0),
        (device(5 << 30), device((5 << 30) - TOLERANCE_BYTES), 0),
        (device(5 << 30), device((5 << 30) - TOLERANCE_BYTES - 1), 1),
        (device(5 << 30), device(6 << 30), 0),
        (device(5 << 30), device(5 << 30, OURS), 1),
        # A neighbour that came or grew explains the difference.
        (device(5 << 30), device(4 << 30, NEIGHBOUR), 0),
        (device(5 << 30, NEIGHBOUR), device(4 << 30, replace(NEIGHBOUR, size_bytes=2 << 30)), 0),
        (device(5 << 30, NEIGHBOUR), device(4 << 30, NEIGHBOUR), 1),
        (device(5 << 30), {}, 1),
    ],
)
def test_memory_leftovers(before: dict[int, DeviceInfo], after: dict[int, DeviceInfo], left: int) -> None:
    assert len(memory_leftovers(before, after, {9}, TOLERANCE_BYTES)) == left


def test_a_story_begins_with_the_culprit_and_ends_with_consequences() -> None:
    other = StageFailure("code2wav", Phase.PROFILE, *exited(-9, "SIGKILL"), 2.0)
    text = render(replace(FAILURE, traceback="Traceback\n  boom\n"), (other,)).splitlines()
    assert text[0] == "stage talker failed in phase load after 1.50s: cannot read x: gone"
    assert text[1] == "  second line"
    assert "    Traceback" in text
    assert text[-1].startswith("  consequence: stage code2wav failed in phase profile")


def test_without_a_traceback_the_log_speaks() -> None:
    text = render(replace(FAILURE, log_path="/l", log_tail=("last words",)), ())
    assert "last lines of /l:\n    last words" in text
