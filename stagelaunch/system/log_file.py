"""Reading log files that others write and put aside: the end of one, and what is new, without reading all of it.

``NAME`` is the log, ``NAME.1`` the one put aside last. Used by the supervisor (evidence, console), its control socket
and ``stagelaunch logs``. Not the rules (`core.logs`), nor the putting aside (`supervisor.logs`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from stagelaunch.system.regular import open_regular

_FIRST_BLOCK_BYTES = 1 << 16
_LAST_BLOCK_BYTES = 1 << 26
_READ_BYTES = 1 << 20
"""What is read of one file in one go, so that nobody who writes fast keeps a reader from everything else."""
_LINE_BYTES = 1 << 16
"""What is kept of a line without end."""
_LINGER_POLLS = 10
"""How long a log that was put aside is still looked at: until its writer has opened the new one."""

Mark = Mapping[int, int]
"""How long the files of a log were at some moment, by inode: what is in them beyond that came later."""
_BEGINNING: Mark = MappingProxyType({})


def now() -> str:
    """The wall clock as logs write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def heading(text: str) -> str:
    """The line in a log that goes on over many processes where a new one begins."""
    return f"---- {now()} {text} ----"


def is_mid_line(path: Path) -> bool:
    """Whether the log's last line has no end: whoever wrote it ended first."""
    try:
        with open_regular(path) as file:
            return file.seek(0, os.SEEK_END) > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
    except OSError:
        return False


def size(path: Path) -> int:
    """How long the file is now, in bytes; 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def mark(path: Path) -> Mark:
    """The present moment of a log, for ``tail``."""
    found = {}
    for file in (path, aside(path, 1)):
        with suppress(OSError):
            status = file.stat()
            found[status.st_ino] = status.st_size
    return found


def aside(path: Path, number: int) -> Path:
    """The file of a log that was put aside, 1 the last; 0 the log itself."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


def tail(path: Path, lines: int, since: Mark = _BEGINNING) -> tuple[str, ...]:
    """The last ``lines`` lines after ``since``, undecodable bytes replaced; empty when there is no such file.

    Also those of a log that was put aside since, where the new one has too few.
    """
    found: list[bytes] = []
    for file in (path, aside(path, 1)):
        if len(found) < lines:
            found = _last_lines(file, lines - len(found), since) + found
    return tuple(line.decode(errors="replace") for line in found)


def _last_lines(path: Path, lines: int, since: Mark) -> list[bytes]:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            begin = since.get(status.st_ino, 0)
            # A new file can get the inode of one that was removed.
            begin = begin if begin <= status.st_size else 0
            file.seek(_offset_of_last(file, lines, begin, status.st_size))
            return file.read(status.st_size - file.tell()).splitlines()
    except OSError:
        return []


def _offset_of_last(file: BinaryIO, lines: int, begin: int, end: int) -> int:
    """Where the last ``lines`` lines before ``end`` begin, not before ``begin``."""
    block_bytes = _FIRST_BLOCK_BYTES
    while True:
        start = max(begin, end - block_bytes)
        file.seek(start)
        block = file.read(end - start)
        # The newline at the very end ends the last line; it begins none.
        at = len(block) - block.endswith(b"\n")
        for _ in range(lines):
            at = block.rfind(b"\n", 0, max(at, 0))
            if at < 0:
                break
        if at >= 0 or start == begin or block_bytes >= _LAST_BLOCK_BYTES:
            return start + at + 1 if lines else end
        block_bytes *= 8


class Follower:
    """The new lines of a log, each once, also while it is put aside and opened anew, or emptied, or not there yet.

    ``lines``: how many of the present ones come first. ``backlog_bytes``: when more than that waits to be read, all
    but the end of it is left out, and a line says so.
    """

    def __init__(self, path: Path, lines: int = 0, backlog_bytes: int | None = None) -> None:
        self._path = path
        self._backlog_bytes = backlog_bytes
        self._files: list[BinaryIO] = []
        """The log, last, and before it what was put aside and may still be written to."""
        self._lingers = 0
        self._rest = b""
        self._open_new()
        if self._files:
            (file,) = self._files
            file.seek(_offset_of_last(file, lines, 0, os.fstat(file.fileno()).st_size))

    def poll(self) -> list[bytes]:
        """The lines that were finished since the last poll, without their newlines."""
        found = [line for file in self._files for line in self._read(file)]
        if self._open_new():
            self._lingers = 0
            found += self._read(self._files[-1])
        elif len(self._files) > 1:
            self._lingers += 1
            if self._lingers > _LINGER_POLLS:
                self._files.pop(0).close()
        return found

    def finish(self) -> list[bytes]:
        """What is left, the line without end included; the files are closed."""
        found = []
        while lines := self.poll():
            found += lines
        rest, self._rest = self._rest, b""
        self.close()
        return found + ([rest] if rest else [])

    def close(self) -> None:
        """Let go of the files."""
        while self._files:
            self._files.pop().close()

    def _open_new(self) -> bool:
        """Open what is at the path now if it is not open already."""
        try:
            status = self._path.stat()
            if self._files and os.path.samestat(status, os.fstat(self._files[-1].fileno())):
                return False
            self._files.append(open_regular(self._path))
        except OSError:
            return False
        return True

    def _read(self, file: BinaryIO) -> list[bytes]:
        found = []
        size_bytes, at = os.fstat(file.fileno()).st_size, file.tell()
        if size_bytes < at:
            # Emptied in place.
            file.seek(0)
        elif self._backlog_bytes is not None and size_bytes - at > self._backlog_bytes:
            file.seek(size_bytes - _FIRST_BLOCK_BYTES)
            found.append(b"... %d bytes left out, see the log file ..." % (size_bytes - _FIRST_BLOCK_BYTES - at))
            self._rest = b""
        *lines, rest = (self._rest + file.read(_READ_BYTES)).split(b"\n")
        self._rest = rest[:_LINE_BYTES]
        return found + lines
