"""What an earlier run of the deployment has left, when its supervisor and its warden died without clearing up.

Found by the run id in the environment and by the recorded cgroup; killed by pidfd, identity checked. Called by the next
start, once it owns the deployment; ``status`` and ``doctor`` only look.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagelaunch.core.errors import AlreadyRunningError, LeftoverError
from stagelaunch.core.stop_plan import KILL_WAIT_S
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.system import cgroup, tree
from stagelaunch.system.process import boot_id

WARDEN_WAIT_S = 15.0
"""How long the warden of an earlier run may take to clear up: what it gives the kernel, and some."""


def find_leftovers(runtime: Runtime) -> tuple[tree.Process, ...]:
    """The living processes of the recorded run. Means leftovers only where no supervisor and no warden of it lives."""
    state = runtime.read_state()
    return tuple(_find(state, tree.read_table())) if state.get("boot") == boot_id() else ()


async def clear_leftovers(runtime: Runtime, say: Callable[[str], None]) -> None:
    """Wait for an earlier warden that still clears up, then kill what is left of its run, and say each.

    Call as the deployment's owner, before its state is written. AlreadyRunningError names a warden that does not end
    in time, LeftoverError what cannot be killed.
    """
    if not await _warden_ended(runtime):
        raise AlreadyRunningError(
            f"cannot start deployment {runtime.directory.name}: the warden of its last run (pid "
            f"{runtime.live_warden()}) still clears up after {WARDEN_WAIT_S:g}s; see what it waits for with "
            "`stagelaunch doctor`, or end it"
        )
    state = runtime.read_state()
    if not isinstance(state.get("run_id"), str) or state.get("boot") != boot_id():
        return
    swept = await asyncio.to_thread(tree.sweep, lambda table: _find(state, table), KILL_WAIT_S)
    stuck = {process.identity for process in swept.left}
    for process in swept.killed:
        if process.identity not in stuck:
            say(f"left by an earlier run (pid {process.pid}, {process.shown_name}): killed")
    if swept.left:
        named = "; ".join(map(tree.describe, swept.left))
        raise LeftoverError(
            f"cannot start deployment {runtime.directory.name}: an earlier run has left what SIGKILL does not end: "
            f"{named}; it waits in the kernel: find what for (dmesg), or restart the machine"
        )
    _remove_cgroup(state)


def _find(state: dict[str, Any], table: tree.Table) -> list[tree.Process]:
    """Who carries the recorded run id or is in the recorded cgroup; never a process that we run under."""
    run_id = state.get("run_id")
    if not isinstance(run_id, str) or not run_id:
        return []
    found = {process.pid: process for process in tree.find_run(run_id, table)}
    directory = _cgroup_of(state)
    inside = () if directory is None else cgroup.pids(directory)
    found.update((pid, table[pid]) for pid in inside if pid in table and not table[pid].is_dead)
    above = tree.ancestors(table, os.getpid())
    return [process for pid, process in found.items() if pid not in above]


def _cgroup_of(state: dict[str, Any]) -> Path | None:
    recorded = state.get("cgroup")
    if not isinstance(recorded, str) or not cgroup.is_of(Path(recorded), str(state.get("run_id"))):
        return None
    return Path(recorded)


def _remove_cgroup(state: dict[str, Any]) -> None:
    directory = _cgroup_of(state)
    if directory is not None:
        cgroup.remove(directory, timeout_s=1.0)


async def _warden_ended(runtime: Runtime) -> bool:
    """Whether no warden of an earlier run lives, now or within its time."""
    pid = runtime.live_warden()
    if pid is None:
        return True
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        # Looked at again: between the look and the opening the number may have gone to another process.
        if runtime.live_warden() != pid:
            return True
        async with asyncio.timeout(WARDEN_WAIT_S):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return True
