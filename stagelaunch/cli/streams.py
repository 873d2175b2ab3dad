"""Standard streams that are closed, full or no longer read: never a reason to lose a deployment."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path
from typing import IO

from stagelaunch.system.regular import open_log


def open_standard_streams() -> None:
    """Put /dev/null where the caller closed a standard stream, so that no file of ours ends up in its place."""
    for fd, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one; children count on it too.
            os.set_inheritable(os.open(os.devnull, mode), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def discard(stream: IO[str]) -> None:
    """What is still buffered goes nowhere; otherwise the interpreter would try again, and complain, at its exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def is_file(fd: int, path: Path) -> bool:
    """Whether the descriptor is of the file at ``path``."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def reopen_output(path: Path) -> None:
    """Go on with stdout and stderr in a file of this name, made anew if need be. OSError leaves them as they are."""
    fd = open_log(path)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(fd, stream.fileno())
    os.close(fd)


def takes_more(stream: IO[str]) -> bool:
    """Whether a write of at most 4096 bytes returns at once, also with an error. A file always does."""
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLOUT)
    return bool(poll.poll(0))


def write_patiently(stream: IO[str], text: str, wait_s: float) -> bool:
    """Whether all of it could be written within ``wait_s``; never waits longer, also for a pipe that nobody reads.

    A part may be written all the same. OSError for a stream that is closed or full for good.
    """
    stream.flush()
    fd, data, deadline_s = stream.fileno(), text.encode(errors="replace"), time.monotonic() + wait_s
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while data:
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            return False
        # So much a pipe takes at once when it says that it takes something.
        data = data[os.write(fd, data[: select.PIPE_BUF]) :]
    return True
