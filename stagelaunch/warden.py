"""The process that ``stagelaunch up`` is: has a supervisor below it, and sees to it that nothing survives it.

``cli.up`` divides itself (``begin``, ``fork``): its child goes on as the supervisor with all that is imported already,
and it becomes the warden in place, so that whoever started it keeps its pid:

    python -I -S warden.py SUPERVISOR CGROUP TERMINAL CONFIG

Tiny and standard library only, run by path: no library, and no file of the current directory, can take it down. It
decides nothing about the deployment and leaves with its supervisor's exit code. The supervisor begins with the signals
that are passed on blocked, and unblocks them when it has handlers: none is lost, none kills it early.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from stagelaunch.system import cgroup, tree
from stagelaunch.system.process import die_with_parent, signal_name

INTERNAL, CLEANUP_INCOMPLETE, INTERRUPTED = 70, 71, 130
"""As in ``core.errors.ExitCode``, which is not standard library."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
SWEEP_S = 10.0
"""How long the kernel gets to remove what was killed."""
SWEEP_AGAIN_S = 1.0
"""The same where the supervisor has waited for it already, and has named it."""
PATIENCE = 2
"""So many INT and TERM are the supervisor's; the next one ends everything."""
SAY_WAIT_MS = 200
"""How long a full pipe may hold up what is said."""
_PR_SET_CHILD_SUBREAPER = 36
_NAMED_MAX = 10


class Run(NamedTuple):
    """One run of a deployment, as its warden knows it."""

    warden: int
    run_id: str
    cgroup: Path | None
    """Where all of it is kept together, if this user may make such a thing."""
    has_terminal: bool
    """Whether the warden had one at the start: it may be closed before the warden is there to see it."""


def begin() -> Run:
    """Make this process fit to be a warden. From the main thread, and before anything is started."""
    # Before all else: from here on a terminal that is closed ends this process, or is a request to stop.
    has_terminal = _has_terminal()
    # Blocked: a signal that comes now is taken later, also by PID 1, which has no defaults. SIGTTOU too: what
    # is said to a terminal from its background must not stop us.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD, signal.SIGTTOU})
    # Ignored, as some callers leave it, children would vanish without telling how they ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _become_subreaper()
    run_id = os.urandom(8).hex()
    return Run(os.getpid(), run_id, cgroup.create(run_id), has_terminal)


def _become_subreaper() -> None:
    """From now on, also after an exec, every orphan below is our child: found, and reaped."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")


def fork(run: Run) -> int:
    """Divide this process: 0 in the supervisor, its pid in the warden. From the main thread, to which the supervisor's
    parent-death signal is tied."""
    try:
        pid = os.fork()
    except OSError:
        if run.cgroup is not None:
            cgroup.remove(run.cgroup)
        raise
    if pid:
        return pid
    die_with_parent(run.warden)
    # A session of its own: a terminal's Ctrl-C reaches it once, through the warden.
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, PASSED_ON)
    os.environ[tree.RUN_VARIABLE] = run.run_id
    return 0


def command(run: Run, supervisor: int, shown: str) -> list[str]:
    """What the process that began the run becomes. ``shown`` is for whoever reads the process table."""
    told = [str(supervisor), str(run.cgroup or ""), "terminal" if run.has_terminal else ""]
    return [sys.executable, "-I", "-S", __file__, *told, shown]


def main(arguments: Sequence[str]) -> int:
    """Watch the supervisor of that command line to its end and beyond; the exit code to leave with."""
    _close_inherited()
    supervisor, directory, terminal = arguments[:3]
    return Warden(int(supervisor), Path(directory) if directory else None, had_terminal=bool(terminal)).watch()


def _close_inherited() -> None:
    """What the caller gave the supervisor is the supervisor's to close: who reads the other end waits for that."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with suppress(OSError):
                os.close(number)


class Warden:
    """Watches one supervisor. The only place that reaps whatever child there is."""

    def __init__(self, supervisor: int, directory: Path | None, *, had_terminal: bool) -> None:
        self._supervisor = supervisor
        # Not reaped yet, so the number is still the supervisor's.
        self._pidfd = os.pidfd_open(supervisor)
        self._directory = directory
        self._status: int | None = None
        self._stops = 0
        self._had_terminal = had_terminal
        self._ignores_hang_up = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._was_hung_up = False

    def watch(self) -> int:
        """Pass signals on until the supervisor is over, then clear up; the exit code."""
        while self._status is None and self._stops <= PATIENCE:
            self._take(signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD}).si_signo)
        code = INTERRUPTED
        if self._status is None:
            say("third request to stop: killing everything now; device memory was not checked")
        elif self._status < 0:
            say(f"the supervisor (pid {self._supervisor}) was killed by {signal_name(-self._status)}; clearing up")
            code = INTERNAL
        else:
            code = self._status
        return self._clear(code)

    def _take(self, number: int) -> None:
        match number:
            case signal.SIGCHLD:
                self._reap()
            case signal.SIGINT | signal.SIGTERM:
                self._stops += 1
                if self._stops <= PATIENCE:
                    self._stop(number)
            case signal.SIGHUP if self._had_terminal and not _has_terminal():
                self._hang_up()
            case signal.SIGHUP:
                self._pass_on(number)
                say("SIGHUP: told the supervisor to reload")
            case _:
                self._pass_on(number)

    def _stop(self, number: int) -> None:
        self._pass_on(number)
        # A stopped process acts on nothing else.
        self._pass_on(signal.SIGCONT)

    def _hang_up(self) -> None:
        # It comes twice: from the kernel, and from the shell. A second SIGTERM would mean "now".
        if self._was_hung_up:
            return
        self._was_hung_up = True
        if self._ignores_hang_up:
            say("the terminal was closed; going on, as SIGHUP was ignored at the start")
            return
        self._stop(signal.SIGTERM)
        say("the terminal was closed: told the supervisor to stop")

    def _pass_on(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> bool:
        """Reap whoever is dead. Whether a child is left: of a subreaper, whether anything at all is left below."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._supervisor:
                    self._status = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return False

    def _clear(self, code: int) -> int:
        """Kill all that is still below, remove the cgroup; ``code``, or another where something cannot be killed."""
        wait_s = SWEEP_AGAIN_S if code == CLEANUP_INCOMPLETE else SWEEP_S
        swept = tree.sweep(self._below, wait_s, reap=self._reap, escalate=self._kill_cgroup)
        self._kill_cgroup()
        if self._directory is not None:
            cgroup.remove(self._directory, timeout_s=0.0 if swept.left else 1.0)
        left = {self._supervisor, *(process.pid for process in swept.left)}
        killed = [process for process in swept.killed if process.pid not in left]
        if killed:
            names = [f"{process.shown_name} (pid {process.pid})" for process in killed[:_NAMED_MAX]]
            more = f" and {len(killed) - _NAMED_MAX} more" if len(killed) > _NAMED_MAX else ""
            say(f"killed what the supervisor left: {', '.join(names)}{more}")
        for process in swept.left:
            say(f"LEFT BEHIND: {tree.describe(process)} survived SIGKILL for {wait_s:g}s")
        if self._reap() and not swept.left:
            say("LEFT BEHIND: processes that fork faster than they can be killed")
        return CLEANUP_INCOMPLETE if self._reap() else code

    def _below(self, table: tree.Table) -> list[tree.Process]:
        inside = () if self._directory is None else cgroup.pids(self._directory)
        # Who forks and ends is no longer in a table that was just read: looked at once more, and killed first.
        found = {process.pid: process for process in tree.children(os.getpid())}
        found |= {process.pid: process for process in tree.descendants(table, os.getpid())}
        found.update((pid, table[pid]) for pid in inside if pid in table)
        return list(found.values())

    def _kill_cgroup(self) -> None:
        if self._directory is not None:
            cgroup.kill(self._directory)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def say(text: str) -> None:
    """One line on stderr. Words that cannot be written, now, are lost: a closed terminal, a full disk, a full pipe."""
    with suppress(OSError):
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(SAY_WAIT_MS):
            os.write(2, f"stagelaunch: {text}\n".encode(errors="replace")[:4096])


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
