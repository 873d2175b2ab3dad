"""Opening files that somebody may have replaced by something else: a FIFO at the path blocks nobody.

Standard library only. Not the files of a directory that all users share: those are `records`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

HUGE_BYTES = 1 << 30
"""What is beyond that was not written by us, and may have been made large without a byte on the disk."""


def open_regular(path: Path) -> BinaryIO:
    """The file, to be read, unbuffered; OSError also where it is no regular file."""
    # Opened without blocking, looked at before anything else: a FIFO would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return open(fd, "rb", buffering=0)


def read_regular(path: Path) -> bytes:
    """All of the file; OSError also where it is no regular file, or far larger than any of ours."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > HUGE_BYTES:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes", str(path))
        return file.read()


def open_log(path: Path) -> int:
    """A descriptor that appends to the file, made if need be. A FIFO never blocks: not opened without a reader, and
    what it has no room for raises."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, 0o644)


def read_own(path: Path, max_bytes: int) -> bytes:
    """All of a file that only this user can have written; OSError for a link, another user's file, or a huge one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise
    if (why := _foreign(os.fstat(fd), max_bytes)) is not None:
        os.close(fd)
        raise OSError(errno.EINVAL, why, str(path))
    with open(fd, "rb", buffering=0) as file:
        return file.read(max_bytes)


def _foreign(status: os.stat_result, max_bytes: int) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "it is not a file"
    if status.st_uid != os.geteuid():
        return f"it is of another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return None if status.st_size <= max_bytes else f"it has {status.st_size:,} bytes"
