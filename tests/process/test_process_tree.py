"""Real processes of a stage and of a dead run: which are found and killed, and which are left alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from wards import WITHOUT_CGROUP, Ward, can_have_cgroup

from stagelaunch.cli.down import _wait
from stagelaunch.core.errors import AlreadyRunningError, LeftoverError
from stagelaunch.supervisor import leftovers
from stagelaunch.supervisor.leftovers import clear_leftovers, find_leftovers
from stagelaunch.supervisor.own_run import OwnRun, StageFamily, sweep_strays
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.system import tree
from stagelaunch.warden import Run

KINDS = "plain,stopped,session,double,exec,titled"


@pytest.fixture
def begin() -> Iterator[Any]:
    with ExitStack() as stack:

        def start(*arguments: Any, **more: Any) -> Ward:
            ward = Ward.begin(*arguments, **more).until("ready")
            stack.callback(ward.close)
            return ward

        yield start


def run_of(ward: Ward) -> OwnRun:
    return OwnRun.under(Run(ward.process.pid, ward.run_id, ward.cgroup, False))


@pytest.mark.parametrize(
    ("how", "survivors"),
    [
        # Its leader dead and reaped, a stage is known by what it says itself, or by the corner it was put into.
        ("tree", {"double"}),
        ("environment", {"titled"}),
        ("cgroup", set()),
    ],
)
def test_what_a_stage_has_started_is_killed_with_it(begin: Any, how: str, survivors: set[str]) -> None:
    if how == "cgroup" and not can_have_cgroup():
        pytest.skip("no writable cgroup v2 here")
    # The supervisor of this test plays the stage's leader.
    stage = {tree.STAGE_VARIABLE: "kin"} if how == "environment" else {}
    changes = "" if how == "cgroup" else WITHOUT_CGROUP
    ward = begin(f"{KINDS},tracker", changes=changes, env={**os.environ, **stage})
    place = ward.cgroup / "stage-kin" if ward.cgroup is not None else None
    family = StageFamily(ward.kin["supervisor"].pid, "kin", run_of(ward), place)
    family.kill(is_leader_ours=how == "tree")
    assert ward.gone(*{*KINDS.split(",")} - survivors)
    assert ward.living() == {"supervisor"} | survivors
    below = tree.descendants(tree.read_table(), ward.process.pid)
    assert [tree.is_tracker(process) for process in below].count(True) == 1
    ward.process.terminate()
    assert ward.end() == 0


def test_strays_are_swept_and_only_they(begin: Any) -> None:
    ward, other = begin(KINDS), begin("session")
    swept = sweep_strays(run_of(ward), 10)
    assert (swept.left, ward.living(), other.living()) == ((), set(), {"supervisor", "session"})


def died(ward: Ward, place: Path) -> Runtime:
    """The runtime directory of a deployment whose warden and supervisor were killed together."""
    runtime = Runtime(place, run_of(ward))
    runtime.write_state("ready")
    tree.send(ward.kin["supervisor"], signal.SIGKILL)
    ward.process.kill()
    ward.process.wait()
    assert ward.gone("supervisor")
    return Runtime(place)


@pytest.mark.parametrize("changes", ["", WITHOUT_CGROUP])
def test_the_next_start_kills_what_a_dead_run_has_left_and_says_it(begin: Any, tmp_path: Path, changes: str) -> None:
    ward, other = begin("session,double", changes=changes), begin("session")
    runtime = died(ward, tmp_path)
    left = {ward.kin[kind].pid for kind in ("session", "double")}
    assert {process.pid for process in find_leftovers(runtime)} == left
    said: list[str] = []
    asyncio.run(clear_leftovers(runtime, said.append))
    assert (ward.living(), other.living()) == (set(), {"supervisor", "session"})
    assert set(said) == {f"left by an earlier run (pid {pid}, python): killed" for pid in left}
    assert ward.cgroup is None or not ward.cgroup.exists()


def test_what_cannot_be_killed_is_an_error_that_names_it(
    begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ward = begin("session")
    runtime = died(ward, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tree, "_send", lambda *_: False)
        patch.setattr(leftovers, "KILL_WAIT_S", 0.1)
        with pytest.raises(LeftoverError, match=rf"process {ward.kin['session'].pid} \(python\) in state S") as caught:
            asyncio.run(clear_leftovers(runtime, print))
    assert caught.value.exit_code == 71


def test_a_warden_that_still_clears_up_is_waited_for(
    begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ward = begin("session")
    Runtime(tmp_path, run_of(ward)).write_state("ready")
    runtime = Runtime(tmp_path)

    async def start() -> None:
        waiting = asyncio.create_task(clear_leftovers(runtime, print))
        await asyncio.sleep(0)
        ward.process.terminate()
        await waiting

    with monkeypatch.context() as patch:
        patch.setattr(leftovers, "WARDEN_WAIT_S", 0.1)
        with pytest.raises(AlreadyRunningError, match=f"warden of its last run .pid {ward.process.pid}"):
            asyncio.run(clear_leftovers(runtime, print))
    assert ward.living() == {"supervisor", "session"}
    asyncio.run(start())
    assert ward.living() == set()


def test_a_run_of_another_boot_and_a_process_above_are_left_alone(
    begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ward = begin("session")
    runtime = died(ward, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(leftovers, "boot_id", lambda: "another")
        assert find_leftovers(runtime) == ()
        asyncio.run(clear_leftovers(runtime, print))
    assert ward.living() == {"session"}
    with monkeypatch.context() as patch:
        # Who starts a deployment from within a dead one's shell must not kill the ground it stands on.
        patch.setattr(tree, "is_marked", lambda *_: True)
        found = {process.pid for process in find_leftovers(runtime)}
    assert ward.kin["session"].pid in found
    assert {os.getpid(), os.getppid()}.isdisjoint(found)


def test_down_waits_for_the_warden_too(begin: Any, tmp_path: Path) -> None:
    ward = begin()
    Runtime(tmp_path, run_of(ward)).write_state("ready")
    pidfd = Runtime(tmp_path).warden_pidfd()
    assert pidfd is not None
    assert not _wait((os.dup(pidfd),), 0)
    ward.process.terminate()
    assert _wait((pidfd,), 10)
    assert Runtime(tmp_path).warden_pidfd() is None
