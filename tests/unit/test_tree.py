"""Who is whose in a process table; what a line of it says; what a sweep believes."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import replace

import pytest

from stagelaunch.system import tree
from stagelaunch.system.tree import Process, Table


def table(*rows: tuple[int, int, int, int]) -> Table:
    """From (pid, parent, group, session)."""
    return {pid: Process(pid, parent, group, session, "S", 1, pid, "x") for pid, parent, group, session in rows}


def pids(processes: tuple[Process, ...]) -> set[int]:
    return {process.pid for process in processes}


# A warden (10), its supervisor (20) with a helper (21) and two stages (30, 40), and what those have started.
RUN = table(
    (1, 0, 1, 1),
    (10, 1, 10, 10),
    (20, 10, 20, 20),
    (21, 20, 20, 20),
    (22, 21, 20, 20),
    (30, 20, 30, 30),
    (31, 30, 30, 30),
    (32, 31, 32, 32),
    (33, 10, 30, 30),
    (34, 10, 34, 30),
    (40, 20, 40, 40),
    (50, 10, 50, 50),
    (60, 1, 60, 60),
)


def test_a_stage_is_its_tree_its_group_and_its_session() -> None:
    assert pids(tree.members(RUN, 30)) == {31, 32, 33, 34}
    assert pids(tree.members(RUN, 40)) == set()


def test_strays_are_all_below_the_warden_but_the_supervisor_and_its_helpers() -> None:
    assert pids(tree.strays(RUN, 10, 20)) == {30, 31, 32, 33, 34, 40, 50}
    # A supervisor without a warden answers for what is below itself.
    assert pids(tree.strays(RUN, 20, 20)) == {30, 31, 32, 40}


def test_a_table_that_changed_while_it_was_read_may_hold_a_circle() -> None:
    assert pids(tree.descendants(table((1, 3, 1, 1), (2, 1, 1, 1), (3, 2, 1, 1)), 1)) == {2, 3}
    assert tree.ancestors(table((1, 3, 1, 1), (2, 1, 1, 1), (3, 2, 1, 1)), 1) == {1, 2, 3}
    assert tree.ancestors(RUN, 32) == {32, 31, 30, 20, 10, 1}


def test_a_name_may_contain_anything() -> None:
    fields = b"T 7 8 9 0 -1 0 0 0 0 0 0 0 0 0 20 0 3 0 12345 0 0"
    process = tree.parse_stat(b"6 (a) S 1 (b\n) " + fields)
    assert process == Process(6, 7, 8, 9, "T", 3, 12345, "a) S 1 (b\n")
    assert tree.describe(process) == "process 6 (a) S 1 (b?) in state T (stopped)"


@pytest.mark.parametrize(("state", "threads", "dead"), [("Z", 1, True), ("Z", 2, False), ("D", 1, False)])
def test_a_leader_that_ended_is_dead_when_its_threads_are(state: str, threads: int, dead: bool) -> None:
    assert Process(1, 1, 1, 1, state, threads, 1, "x").is_dead is dead


def test_only_the_process_that_was_meant_is_signalled() -> None:
    ready, say = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(say, b".")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    process = tree.read_process(pid)
    assert process is not None
    former = Process(**{**vars(process), "start": process.start - 1})
    assert not tree.send(former, signal.SIGKILL)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    assert tree.send(process, signal.SIGKILL)
    assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
    assert not tree.send(process, signal.SIGKILL)


def test_what_a_sweep_cannot_kill_is_returned_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "open_process", lambda _: None)
    stuck = Process(2, 1, 1, 1, "D", 1, 1, "stuck")
    swept = tree.sweep(lambda _: [stuck], 0.05)
    assert swept.left == (stuck,)
    assert tree.describe(stuck).endswith("in state D (uninterruptible sleep)")


def test_a_look_that_finds_nobody_is_not_believed_while_somebody_is_left() -> None:
    answers = [True, True, False]
    assert tree.sweep(lambda _: [], 10, reap=lambda: answers.pop(0)).left == ()
    assert answers == []


def test_a_table_of_another_namespace_is_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.getpid() in tree.read_table()
    monkeypatch.setattr(os, "readlink", lambda _: "1")
    assert tree.read_table() == {}
    assert tree.children(os.getpid()) == ()


def test_a_table_that_cannot_be_read_for_want_of_descriptors_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_descriptors(_: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "listdir", out_of_descriptors)
    assert tree.read_table() == {}


def test_a_name_is_shown_as_one_line_of_plain_characters() -> None:
    process = replace(RUN[30], name="a\x1b[2J\n::error::x")
    assert process.shown_name == "a?[2J?::error::x"
    assert tree.describe(process).startswith("process 30 (a?[2J?::error::x) in")


def test_a_wait_for_processes_ends_with_its_deadline() -> None:
    fd = os.pidfd_open(os.getpid())
    assert not tree.wait_for_ends([fd], time.monotonic() + 0.01)
    os.close(fd)
