"""The process behind a forkserver: started, told what to import, ended. Standard library only.

One may be started before it is known what for: it imports what every stage needs while the supervisor imports its own.
Used by ``forkserver`` and, for that one, by ``cli.up``.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).resolve().parents[1] / "worker" / "forkserver.py"
KILLED_S = 5.0
"""How long what was killed may take to end."""
_spare: ForkserverProcess | None = None


class ForkserverProcess:
    """OSError where it cannot be started. From the main thread only: its parent-death signal is tied to it."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
                self.pidfd = os.pidfd_open(self._process.pid)
            except OSError:
                self.channel.close()
                raise
        self.channel.setblocking(False)
        self.pid = self._process.pid
        self.send({"parent_pid": os.getpid(), "sys_path": sys.path})

    def begin(self, environment: Mapping[str, str], engines: Sequence[str], backend: str, log: Path) -> None:
        """Have it import these engines under these variables; what that says goes to the log.

        OSError where that cannot be said: it is of no use then, and ended.
        """
        job = {"environment": dict(environment), "engines": list(engines), "backend": backend, "log": str(log)}
        try:
            if self.send(job):
                return
            said = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            said = error
        self.kill()
        self.wait()
        if said.errno == errno.EMSGSIZE:
            raise OSError(said.errno, "the variables of its env are too long for one message; shorten them") from said
        raise said

    def send(self, message: Mapping[str, Any], fd: int | None = None) -> bool:
        """Tell it something; False where it has not room for that now. Its death is noticed elsewhere."""
        data = json.dumps(message).encode()
        try:
            socket.send_fds(self.channel, [data], [] if fd is None else [fd])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass
        return True

    def signal(self, number: int) -> None:
        """Send it a signal. Not once ``wait`` has returned."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it, and its stages. Does not wait."""
        self._process.kill()

    def wait(self) -> int | None:
        """Its exit code, or minus the signal's number; for use when it has ended or was killed, and only then.

        None where it lives on: the kernel may have it in a call that nothing ends. The warden names it then.
        """
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(KILLED_S)
        if self.pidfd >= 0:
            self.channel.close()
            os.close(self.pidfd)
            self.pidfd = -1
        return code


def prepare() -> None:
    """Start one now that ``take`` gives later. Best effort: where that cannot be, ``take`` says so."""
    global _spare
    with suppress(OSError):
        _spare = ForkserverProcess()


def take() -> ForkserverProcess:
    """The one that was prepared, or a new one."""
    global _spare
    process, _spare = _spare, None
    return process or ForkserverProcess()


def discard() -> None:
    """End the one that was prepared, if nobody has taken it."""
    global _spare
    process, _spare = _spare, None
    if process is not None:
        process.kill()
        process.wait()
