"""What belongs to this run: its warden, its id, its cgroup; what a stage has started; what nobody answers for.

Finds and kills; decides nothing about the launch. Used by ``stage_process``, by the end of a run, and (for what a dead
run has left) by ``leftovers``.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagelaunch.core.errors import ExitCode
from stagelaunch.system import cgroup, tree
from stagelaunch.system.process import die_with_parent, start_time
from stagelaunch.warden import Run

WARDEN_DIED = signal.SIGUSR2
ORPHANED_S = 5.0
"""How long what is killed may take to be gone."""


@dataclass(frozen=True)
class OwnRun:
    """What the warden has told this supervisor about its run."""

    warden_pid: int
    warden_start: int | None
    run_id: str
    cgroup: Path | None

    @classmethod
    def under(cls, run: Run) -> OwnRun:
        """The run whose warden is our parent."""
        return cls(run.warden, start_time(run.warden), run.run_id, run.cgroup)

    def to_json(self) -> dict[str, Any]:
        """As it is recorded in the state."""
        return {
            "warden": {"pid": self.warden_pid, "start": self.warden_start},
            "run_id": self.run_id,
            "cgroup": None if self.cgroup is None else str(self.cgroup),
        }


@dataclass(frozen=True)
class StageFamily:
    """All that one process of a stage has started, as far as it can be told."""

    leader: int
    name: str
    run: OwnRun | None
    cgroup: Path | None

    @classmethod
    def begin(cls, leader: int, name: str, run: OwnRun | None) -> StageFamily:
        """Call right after ``leader`` was started: it goes into a cgroup of its own, where there may be one."""
        place = None if run is None or run.cgroup is None else run.cgroup / f"stage-{name}.{leader}"
        return cls(leader, name, run, place if place is not None and cgroup.enter(place, leader) else None)

    def kill(self, *, is_leader_ours: bool) -> None:
        """SIGKILL to all of it but its leader, and but resource trackers; waits for no end.

        ``is_leader_ours``: the leader is not reaped, so that its number still means its tree, group and session.
        """
        tree.kill_now(lambda table: self.find(table, is_leader_ours=is_leader_ours))

    def end(self) -> None:
        """The leader is dead: kill what is left, trackers included that did not end, and give the cgroup back."""
        if self.cgroup is None or cgroup.remove(self.cgroup):
            return
        inside = [process for pid in cgroup.pids(self.cgroup) if (process := tree.read_process(pid)) is not None]
        # What still has a tracker is left to the warden: killed now, the tracker would leave files in /dev/shm.
        if not any(tree.is_tracker(process) for process in inside):
            cgroup.kill(self.cgroup)

    def find(self, table: tree.Table, *, is_leader_ours: bool) -> list[tree.Process]:
        """Its members by tree, group, session, cgroup and environment, without the leader and without ourselves."""
        found = list(tree.members(table, self.leader)) if is_leader_ours else []
        if self.cgroup is not None:
            found += [table[pid] for pid in cgroup.pids(self.cgroup) if pid in table]
        if self.run is not None:
            strays = tree.strays(table, self.run.warden_pid, os.getpid())
            found += [process for process in strays if tree.is_marked(process, self.run.run_id, self.name)]
        return list({p.pid: p for p in found if p.pid not in (self.leader, os.getpid())}.values())


def sweep_strays(run: OwnRun | None, timeout_s: float) -> tree.Swept:
    """Kill everything below the warden but this supervisor and its helpers, for ``timeout_s`` at most. Blocks.

    For the end, when every stage is over: it would kill a stage that lives. What survives is returned with its state.
    Without a warden only what is below this process is looked at.
    """

    def find(table: tree.Table) -> list[tree.Process]:
        top = os.getpid() if run is None else run.warden_pid
        found = {process.pid: process for process in tree.strays(table, top, os.getpid())}
        inside = () if run is None or run.cgroup is None else cgroup.pids(run.cgroup)
        found.update((pid, table[pid]) for pid in inside if pid in table)
        return list(found.values())

    return tree.sweep(find, timeout_s)


def end_with_warden(run: Run) -> None:
    """When the warden is killed, kill at once all that this process has started, then itself.

    The kernel tells by a signal. Not SIGKILL, which would leave what stages have started to nobody: stages die with
    this process, their children do not. Handled by the interpreter, not the loop, which may be stuck.
    """

    def orphaned(*_: object) -> None:
        # Anybody may send the signal; only without the warden it means anything.
        if os.getppid() != run.warden:
            tree.sweep(lambda table: _everything(table, run), ORPHANED_S)
            os._exit(ExitCode.INTERNAL)

    signal.signal(WARDEN_DIED, orphaned)
    # The warden starts us with all signals blocked that it passes on.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {WARDEN_DIED})
    die_with_parent(run.warden, WARDEN_DIED)


def _everything(table: tree.Table, run: Run) -> list[tree.Process]:
    me = os.getpid()
    found = {process.pid: process for process in tree.descendants(table, me)}
    found |= {process.pid: process for process in tree.find_run(run.run_id, table)}
    inside = () if run.cgroup is None else cgroup.pids(run.cgroup)
    found |= {pid: table[pid] for pid in inside if pid in table}
    # Our own tracker waits for us, and ends by itself then.
    return [process for pid, process in found.items() if pid != me and not tree.is_tracker(process)]
