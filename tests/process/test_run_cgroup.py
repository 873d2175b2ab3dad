"""A corner of the real cgroup tree: who is put in is found, killed, and gone with it. Only where this user may."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from wards import can_have_cgroup

from stagelaunch.system import cgroup

pytestmark = pytest.mark.skipif(not can_have_cgroup(), reason="no writable cgroup v2 here")


@pytest.fixture
def corner() -> Iterator[Path]:
    made = cgroup.create(f"test-{os.getpid()}")
    assert made is not None
    yield made
    cgroup.kill(made)
    assert cgroup.remove(made, 5)


@pytest.fixture
def child() -> Iterator[int]:
    if (pid := os.fork()) == 0:
        signal.pause()
        os._exit(0)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_who_is_put_in_is_there_and_dies_with_it(corner: Path, child: int) -> None:
    assert cgroup.is_of(corner, f"test-{os.getpid()}")
    assert cgroup.enter(corner / "stage-a.1", child)
    assert cgroup.pids(corner) == (child,)
    assert not cgroup.remove(corner)
    cgroup.kill(corner)
    pidfd = os.pidfd_open(child)
    assert os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT) is not None
    os.close(pidfd)
    assert cgroup.pids(corner) == ()
    assert cgroup.remove(corner, 5)
    assert not corner.exists()


def test_a_process_that_is_gone_makes_no_directory(corner: Path) -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not cgroup.enter(corner / "stage-a.1", pid)
    assert list(corner.glob("stage-*")) == []


def test_what_a_killed_warden_forgot_is_removed_when_it_is_old_and_empty(
    corner: Path, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "own_directory", lambda: corner)
    empty, used = corner / "stagelaunch-a", corner / "stagelaunch-b"
    empty.mkdir()
    assert cgroup.enter(used / "stage", child)
    assert cgroup.create("c") is not None
    assert (empty.exists(), used.exists()) == (True, True)
    monkeypatch.setattr(cgroup, "_FORGOTTEN_S", -1.0)
    assert cgroup.create("d") is not None
    assert sorted(place.name for place in corner.glob("stagelaunch-*")) == ["stagelaunch-b", "stagelaunch-d"]
