"""The process table, read once and asked often; and killing by identity until nothing is left.

Standard library only: the warden has no more. Not who belongs to a run: the warden and ``supervisor.own_run`` say that.
A process is signalled through a pidfd only, after its start time was compared: its number may be another's by then.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from stagelaunch.system.process import start_time

RUN_VARIABLE = "STAGELAUNCH_RUN"
"""In the environment of every process of a run: its run id. Inherited, whatever session or parent a process has."""
STAGE_VARIABLE = "STAGELAUNCH_STAGE"
"""In the environment of what a stage starts by exec: the stage's name."""
TRACKER_GRACE_S = 1.0
"""How long multiprocessing's resource tracker has for its work once all others are gone."""
LOOK_AGAIN_S = 0.05
"""How long the dead are waited for before the table is read again: the living may have forked meanwhile."""
QUICK_LOOKS = 20
"""So many looks that go on finding the living mean that they fork as fast as they are killed, or cannot be killed."""
_WATCHED_MAX = 256
_TRACKER = b"from multiprocessing.resource_tracker import main"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by a tracer",
    "Z": "zombie",
    "X": "dead",
    "I": "idle",
    "P": "parked",
}


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    """The kernel's letter."""
    threads: int
    start: int
    """In clock ticks since boot; with the pid it names the process."""
    name: str

    @property
    def identity(self) -> tuple[int, int]:
        """What no other process of this boot has."""
        return self.pid, self.start

    @property
    def shown_name(self) -> str:
        """The name, which may hold anything, as it can be printed."""
        return "".join(c if c.isprintable() else "?" for c in self.name)

    @property
    def is_dead(self) -> bool:
        """Whether nothing of it runs any more. A leader that has ended may have threads that have not."""
        return self.state in "ZX" and self.threads <= 1


Table = dict[int, Process]
Find = Callable[[Table], Iterable[Process]]
"""Names the processes meant, in a table just read."""


@dataclass(frozen=True)
class Swept:
    """What a sweep has come to."""

    killed: tuple[Process, ...]
    left: tuple[Process, ...]
    """What lived on at the deadline, as it was then."""


def read_table() -> Table:
    """Every process this one can see, by pid. Empty where /proc shows another PID namespace, whose pids mean others,
    and where it cannot be read, for want of descriptors."""
    if not _proc_is_ours():
        return {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return {}
    found = filter(None, (read_process(int(name)) for name in names if name.isdecimal()))
    return {process.pid: process for process in found}


def _proc_is_ours() -> bool:
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def read_process(pid: int) -> Process | None:
    """The process with this number now, or None."""
    text = _read(f"/proc/{pid}/stat")
    return parse_stat(text) if text else None


def parse_stat(text: bytes) -> Process:
    """One ``/proc/PID/stat``. The name is in parentheses and may contain anything, spaces and parentheses included."""
    begin, end = text.index(b"("), text.rindex(b")")
    fields = text[end + 2 :].split()
    return Process(
        pid=int(text[:begin]),
        name=text[begin + 1 : end].decode(errors="replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
        start=int(fields[19]),
    )


def describe(process: Process) -> str:
    """The process for a human: pid, name and what it does."""
    state = process.state
    return f"process {process.pid} ({process.shown_name}) in state {state} ({_STATES.get(state, 'unknown')})"


def describe_pid(pid: int) -> str:
    """The process of this number now, for a human."""
    process = read_process(pid)
    return f"process {pid} (gone)" if process is None else describe(process)


def descendants(table: Table, pid: int) -> tuple[Process, ...]:
    """Everything below ``pid``, children before grandchildren; not itself."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    todo = [pid]
    for parent in todo:
        # The table was not read in one instant: what a number means may have changed meanwhile, even into a circle.
        new = [child for child in children.get(parent, ()) if child.pid not in found and child.pid != pid]
        found.update((child.pid, child) for child in new)
        todo.extend(child.pid for child in new)
    return tuple(found.values())


def children(pid: int) -> tuple[Process, ...]:
    """What the main thread of ``pid`` has started or adopted, right now: quicker than a table by far. Empty where the
    kernel does not tell."""
    numbers = _read(f"/proc/{pid}/task/{pid}/children").split() if _proc_is_ours() else []
    return tuple(filter(None, (read_process(int(number)) for number in numbers)))


def ancestors(table: Table, pid: int) -> frozenset[int]:
    """The pids above ``pid``, and itself."""
    found: set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid].parent
    return frozenset(found)


def members(table: Table, leader: int) -> tuple[Process, ...]:
    """The tree below ``leader``, its process group and its session, without itself.

    Only while ``leader`` is not reaped: its number may be anyone's later.
    """
    below = {process.pid for process in descendants(table, leader)}
    return tuple(
        process
        for process in table.values()
        if process.pid != leader and (process.pid in below or leader in (process.group, process.session))
    )


def strays(table: Table, warden: int, supervisor: int) -> tuple[Process, ...]:
    """What is below the warden but neither the supervisor nor one of its helpers, which live in its own session."""
    known = table.get(supervisor)
    helpers = {process.pid for process in descendants(table, supervisor) if known and process.session == known.session}
    return tuple(
        process for process in descendants(table, warden) if process.pid != supervisor and process.pid not in helpers
    )


def is_tracker(process: Process) -> bool:
    """Whether it is multiprocessing's resource tracker: killed with the others it leaves files in /dev/shm."""
    return any(argument.startswith(_TRACKER) for argument in _words(process.pid, "cmdline"))


def is_marked(process: Process, run_id: str, stage: str | None = None) -> bool:
    """Whether its environment says it belongs to this run, and to this stage. False where that cannot be read."""
    return carries(process, {RUN_VARIABLE: run_id} | ({STAGE_VARIABLE: stage} if stage else {}))


def carries(process: Process, variables: Mapping[str, str]) -> bool:
    """Whether it was started with these in its environment. False where that cannot be read, or was overwritten."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    return wanted <= set(_words(process.pid, "environ"))


def find_run(run_id: str, table: Table | None = None) -> tuple[Process, ...]:
    """Every living process that says it belongs to this run, whoever its parent is."""
    known = read_table() if table is None else table
    return tuple(process for process in known.values() if not process.is_dead and is_marked(process, run_id))


def _words(pid: int, file: str) -> list[bytes]:
    return _read(f"/proc/{pid}/{file}").split(b"\0")


def _read(path: str) -> bytes:
    """All of it; nothing where the process is gone or another user's."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall() or b""
    except OSError:
        return b""


def open_process(process: Process) -> int | None:
    """A pidfd of this very process; None when it is gone. Opened first, then compared: from then on it is the same."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    if start_time(process.pid) == process.start:
        return fd
    os.close(fd)
    return None


def send(process: Process, number: signal.Signals) -> bool:
    """Signal this very process. False when it is gone, or another user's."""
    fd = open_process(process)
    if fd is None:
        return False
    try:
        return _send(fd, number)
    finally:
        os.close(fd)


def _send(pidfd: int, number: signal.Signals) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    return True


def kill_now(find: Find) -> tuple[Process, ...]:
    """SIGKILL to all that ``find`` names but resource trackers, until a look finds nobody new. Waits for no end."""
    killed: dict[tuple[int, int], Process] = {}
    for _ in range(QUICK_LOOKS):
        new = [p for p in find(read_table()) if not p.is_dead and p.identity not in killed and not is_tracker(p)]
        if not new:
            break
        for process in new:
            send(process, signal.SIGKILL)
            killed[process.identity] = process
    return tuple(killed.values())


def sweep(
    find: Find,
    timeout_s: float,
    *,
    reap: Callable[[], bool] = lambda: False,
    escalate: Callable[[], None] = lambda: None,
) -> Swept:
    """Kill all that ``find`` names until nothing of it lives, however it forks meanwhile, for ``timeout_s`` at most.

    Resource trackers may end by themselves when they are the last. ``reap`` is called before each look; while it says
    that somebody is left, a look that finds nobody is not believed: who forks and ends can slip through it.
    ``escalate`` is called when many looks did not do.
    """
    return _Sweep(find, time.monotonic() + timeout_s, reap, escalate).run()


@dataclass
class _Sweep:
    find: Find
    deadline_s: float
    reap: Callable[[], bool]
    escalate: Callable[[], None]
    killed: dict[tuple[int, int], Process] = field(default_factory=dict)
    looks: int = 0
    trackers_until_s: float | None = None

    def run(self) -> Swept:
        while True:
            somebody_is_left = self.reap()
            living = [process for process in self.find(read_table()) if not process.is_dead]
            others = [process for process in living if not is_tracker(process)]
            if not (living or somebody_is_left) or time.monotonic() >= self.deadline_s:
                return Swept(tuple(self.killed.values()), tuple(others or living))
            self.looks += 1
            if self.looks % QUICK_LOOKS == 0:
                self.escalate()
            if others or (living and self._trackers_are_late()):
                self._kill(others or living)
            else:
                self._watch(living)

    def _trackers_are_late(self) -> bool:
        """Whether the trackers have been the last for their whole grace; it begins with the first question."""
        if self.trackers_until_s is None:
            self.trackers_until_s = time.monotonic() + TRACKER_GRACE_S
        return time.monotonic() >= self.trackers_until_s

    def _kill(self, processes: list[Process]) -> None:
        # A tracker that did not end is a helper of ours, and nothing that anybody left.
        self.killed.update((process.identity, process) for process in processes if not is_tracker(process))
        self._watch(processes, signal.SIGKILL)

    def _watch(self, processes: list[Process], number: signal.Signals | None = None) -> None:
        """Wait for the end of these, but not long; with a number they are signalled first."""
        watched: list[int] = []
        for process in processes:
            fd = open_process(process)
            if fd is None:
                continue
            if number is not None:
                _send(fd, number)
            if len(watched) < _WATCHED_MAX:
                watched.append(fd)
            else:
                os.close(fd)
        until_s = min(time.monotonic() + LOOK_AGAIN_S, self.deadline_s)
        wait_for_ends(watched, until_s)
        for fd in watched:
            os.close(fd)


def wait_for_ends(pidfds: Iterable[int], deadline_s: float) -> bool:
    """Whether all of these processes ended by the (monotonic) deadline."""
    poll, waited = select.poll(), set(pidfds)
    for fd in waited:
        poll.register(fd, select.POLLIN)
    while waited:
        left_s = deadline_s - time.monotonic()
        with suppress(InterruptedError):
            for fd, _ in poll.poll(max(0.0, left_s) * 1000):
                poll.unregister(fd)
                waited.discard(fd)
        if left_s <= 0:
            break
    return not waited
