"""Facts about processes and the few calls the standard library lacks."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Loaded here, so that a child that was just forked has nothing to load.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """From now on the kernel sends this process ``number`` when the thread that started it ends; also after an exec.

    Arming is not retroactive, so a parent that died before is looked for afterwards; then this process leaves at once.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot arm the parent-death signal")
    if os.getppid() != parent_pid:
        os._exit(1)


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is no such process.

    With the pid and the boot id it names a process for good: pids are reused, start times are not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may contain anything, spaces and parentheses included.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def own_pids() -> tuple[int, ...]:
    """This process's pid, then its pids in the namespaces around, outermost first, as far as the kernel tells."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return tuple(dict.fromkeys((os.getpid(), *map(int, line.split()[1:]))))
    return (os.getpid(),)


def boot_id() -> str:
    """Identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Identity:
    """What names a process for good."""

    pid: int
    start: int
    boot: str
    pid_namespace: int
    """In which ``pid`` counts: elsewhere it is another process, or none."""

    @classmethod
    def of_self(cls) -> Identity:
        """Of this process."""
        start = start_time(os.getpid())
        assert start is not None
        return cls(os.getpid(), start, boot_id(), _pid_namespace())

    def is_surely_dead(self) -> bool:
        """Whether that process cannot be alive; False also where this process cannot know."""
        if self.boot != boot_id():
            return True
        if self.pid_namespace != _pid_namespace():
            return False
        try:
            # Signal 0 sends nothing. /proc alone will not do: it can be mounted to hide the processes of others.
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        with suppress(OSError):
            return start_time(self.pid) not in (None, self.start)
        return False


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 64`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
