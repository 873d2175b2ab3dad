"""Open-file-description byte locks: owned by one ``open``, dropped by the kernel with its last reference.

Unlike POSIX locks they survive the close of another descriptor of the file; unlike flock they lock single bytes.
Non-blocking only: whoever waits brings a deadline. Threads that share a descriptor do not exclude each other.
"""

from __future__ import annotations

import fcntl
import struct

# struct flock of a 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (must be 0 for these commands).
_FLOCK = struct.Struct("hhqqi4x")


def try_lock(fd: int, at: int) -> bool:
    """Lock the byte at offset ``at`` exclusively; False when another description holds it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, at, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, at: int) -> None:
    """Release the byte, for every process that shares the description: never call it in a forked child."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, at, 1, 0))


def locked_by_another(fd: int, at: int) -> bool:
    """Whether another description holds the byte. One's own lock does not count."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, at, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
