"""Hears when somebody lets go of a file, so that whoever polls for its lock looks at once instead of at its next try.

A hint, never a promise: the kernel tells of a closed file a moment before it drops the locks of a killed process, a
replaced file is another file, and where inotify is used up nothing is heard. So whoever waits goes on polling. Used by
``system.locks`` only. By ctypes, because the standard library has no inotify.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_IN_CLOSE = 0x8 | 0x10
_READ_BYTES = 65536


class LettingGo:
    """Of one file at a time. Takes nothing before it is told to listen; ``close`` it."""

    def __init__(self) -> None:
        self._fd = -1
        self._watch = -1

    def listen(self, path: Path) -> None:
        """Hear of this file from now on."""
        if self._fd < 0:
            self._fd = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            self._watch = _libc().inotify_add_watch(self._fd, os.fsencode(path), _IN_CLOSE)

    def wait(self, timeout_s: float) -> bool:
        """True as soon as somebody has closed the file since the last call; False after ``timeout_s``."""
        if self._watch < 0:
            time.sleep(timeout_s)
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        # All that has been told until now, so that it is told once.
        with suppress(BlockingIOError):
            os.read(self._fd, _READ_BYTES)
        return True

    def ignore(self) -> None:
        """Hear no more of the file. At once, where ``close`` waits milliseconds for a watch that is still there."""
        if self._watch >= 0:
            _libc().inotify_rm_watch(self._fd, self._watch)
            self._watch = -1

    def close(self) -> None:
        """Give back what it takes. Idempotent."""
        self._watch = -1
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
