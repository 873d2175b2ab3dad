"""Where a worker's stdout, stderr and native crashes go: the stage's own file, by its own descriptor.

So no other process can block or lose them, and a disk that is full or read-only costs the words, never the stage.
Used by `worker.main`; the control thread has the file opened anew when it was put aside.
"""

from __future__ import annotations

import errno
import faulthandler
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stagelaunch.system.log_file import heading
from stagelaunch.system.regular import open_log

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EPIPE)


class Output:
    """The stage's log. ``on_lost`` hears, once, why it cannot be opened."""

    def __init__(self, path: Path, on_lost: Callable[[str], None]) -> None:
        self._path = path
        self._on_lost: Callable[[str], None] | None = on_lost

    def redirect(self) -> None:
        """Send everything this process says to the file; to nowhere if it cannot be opened. SIGQUIT writes all stacks
        there, also of a process that hangs; one that does not may crash by it: ``dump_stacks`` is for those."""
        try:
            self._open_over_output()
        except OSError as error:
            self._lost(error, "what it says is not kept")
            _put_over_output(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        sys.stdout = _stream(1)
        sys.stderr = _stream(2)
        # Both write to descriptor 2, whatever file that is then.
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)

    def dump_stacks(self) -> None:
        """Write the stacks of all threads to the file. Called by a thread that has the interpreter: no other one runs
        while its frames are read. A signal handler reads them whatever they do."""
        with suppress(OSError):
            os.write(2, f"{heading('stacks of all threads, asked for')}\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)

    def reopen(self) -> None:
        """Go on in a file of that name; in the old one if it cannot be opened."""
        try:
            self._open_over_output()
        except OSError as error:
            self._lost(error, "what it says goes to the old file")

    def _open_over_output(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _put_over_output(open_log(self._path))

    def _lost(self, error: OSError, instead: str) -> None:
        say, self._on_lost = self._on_lost, None
        if say is not None:
            say(f"cannot open its log {self._path}: {error.strerror}; {instead}")


def flush_output() -> None:
    """What was printed and not written yet is written."""
    for stream in (sys.stdout, sys.stderr):
        # A library may have put anything in their place: None, or what can be written to and no more.
        with suppress(Exception):
            stream.flush()


def _put_over_output(fd: int) -> None:
    flush_output()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _stream(fd: int) -> io.TextIOWrapper:
    raw = _NeverFull(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _NeverFull(io.FileIO):
    """A file into which everything goes: what finds no room is gone, and whoever wrote it does not hear of it."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            written = None
        return memoryview(data).nbytes if written is None else written
