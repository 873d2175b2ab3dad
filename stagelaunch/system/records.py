"""Files in a directory that every user of the machine shares: a flock on a path, and records believed while locked.

A record says who does or has something (holds a lock, waits for it, claims memory). Not the meaning of any record: that
is `locks` and `claims`, which write and read them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagelaunch.core.errors import LockDirectoryError

PAUSE_FIRST_S, PAUSE_MAX_S, PAUSE_GROWTH = 0.002, 0.010, 1.5
"""Polled, because a blocking flock takes no deadline. The last pause bounds the hand-over latency where nobody hears
that the lock was let go of."""

_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:-]{0,127}")
# Anyone may write to the directory: never follow a planted link, never block on a planted FIFO.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_RECORD_BYTES = 4096
_OUR_TROUBLE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
"""Why a file cannot be opened that says nothing about the file: then its record must not count as absent."""


class LockFile:
    """One flock on one path. ``release`` may be called at any time, any number of times.

    Not filelock, also not for the gate: 4.3 refuses another user's lock file in a sticky directory (its
    ``foreign_owner``), which is just what this directory is for, and checks for an unlinked file, not a replaced one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._path

    def attempt(self, operation: int) -> bool:
        """Try once, without waiting. True: locked, and the path still names the locked file."""
        with _explained(self._path):
            if self._fd < 0:
                self._fd = _open_shared(self._path)
                _open_files.add(self)
            try:
                fcntl.flock(self._fd, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                # Even if the file was replaced meanwhile: its holder is inside, and whoever waits for it waits on.
                return False
            if self._is_current():
                return True
            # Replaced under us: the next attempt opens the file that others lock.
            self.release()
        return False

    def _is_current(self) -> bool:
        try:
            return _names(self._path, self._fd)
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock and close. Unlocked first, because a forked child may share the descriptor and outlive us."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        """Close without unlocking: all that a forked child may do with its parent's lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _open_files.discard(self)
            os.close(fd)


_open_files: set[LockFile] = set()


def _close_inherited() -> None:
    for file in tuple(_open_files):
        file.close()


# Forking while holding is wrong, but libraries do it: the child then neither keeps the lock nor frees it.
os.register_at_fork(after_in_child=_close_inherited)


class Record:
    """What one process says about itself, in a file of its own; believed while its writer keeps it locked.

    The kernel drops that lock with the process, so no comparison of pids, start times and boots is needed, and
    a reader in another container (another PID namespace) judges it as well as anyone.
    """

    def __init__(self, directory: Path, uuid: str, role: str, fields: Mapping[str, Any]) -> None:
        self._pid = os.getpid()
        stamp = f"{self._pid}.{time.clock_gettime_ns(time.CLOCK_BOOTTIME)}"
        self._path = directory / f"{uuid}.{role}.{stamp}"
        self._text = json.dumps(fields)
        self._lock = LockFile(self._path)

    def publish(self) -> None:
        """Put the record in place, locked. In place from the start: a draft would outlive a writer killed before it is
        renamed. Until it is whole, readers take it for none."""
        with _explained(self._path):
            # A reader may hold it for the instant in which it looks, or take it away as stale: then it is made again.
            while not self._lock.attempt(fcntl.LOCK_EX):
                time.sleep(PAUSE_FIRST_S)
            self._path.write_text(self._text)
            self._path.chmod(0o644)

    def close(self) -> None:
        """Take the record away, published or not. Does nothing in a forked child: it is the parent's."""
        if self._pid == os.getpid():
            # Nobody may be able to write here any more; unlocked, the record is not believed and goes sooner or later.
            with suppress(OSError):
                self._path.unlink()
            self._lock.release()


@dataclass(frozen=True)
class Found:
    """A record whose writer lives."""

    path: Path
    fields: dict[str, Any]
    user_id: int
    """Who wrote it."""


def find_records(directory: Path, uuid: str, role: str) -> tuple[Found, ...]:
    """Every record of this role that is believed, in no order; none where there is no directory.

    Stale ones are removed. LockDirectoryError where the directory or a record cannot be read for want of anything.
    """
    prefix = f"{uuid}.{role}."
    with _explained(directory, "lock directory"):
        try:
            names = [name for name in os.listdir(directory) if name.startswith(prefix)]
        except FileNotFoundError:
            return ()
        return tuple(filter(None, (_read_record(directory / name) for name in names)))


def _read_record(path: Path) -> Found | None:
    """The record, or None where it is stale (removed if this user may), gone, or not a record."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        if error.errno in _OUR_TROUBLE:
            raise
        return None
    try:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _remove_stale(path, fd)
            return None
        fields = json.loads(os.read(fd, _RECORD_BYTES))
        return Found(path, fields, os.fstat(fd).st_uid) if isinstance(fields, dict) else None
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(fd)


def _remove_stale(path: Path, fd: int) -> None:
    # While it is locked here its writer cannot replace it. Without the look, of two readers that opened a record just
    # before it was locked, the slower one would remove the record that was made again after the faster one.
    with suppress(OSError):
        if _names(path, fd):
            path.unlink()


def checked_uuid(uuid: str) -> str:
    """The UUID, if it may be part of a file name; ValueError otherwise."""
    if _UUID.fullmatch(uuid) is None:
        raise ValueError(
            f"cannot lock device {uuid!r}: its UUID becomes a file name and may only have letters, digits, '-', '_'"
            " and ':'; pass the UUID as the inventory prints it"
        )
    return uuid


def _names(path: Path, fd: int) -> bool:
    return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))


def _open_shared(path: Path) -> int:
    """Open a file that any user may have created; create it for all users, whatever the umask."""
    while True:
        with suppress(FileNotFoundError):
            # No O_CREAT here: fs.protected_regular denies it on another user's file in a sticky directory.
            fd = os.open(path, _OPEN_FLAGS)
            break
        with suppress(FileExistsError):
            fd = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(fd, 0o666)
            break
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is not a regular file")
    return fd


@contextmanager
def _explained(path: Path, what: str = "lock file") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LockDirectoryError(
            f"cannot use {what} {path}: {error.strerror or error};"
            " make its directory writable for every user (mode 1777) and its files readable, or name another"
        ) from error


def boottime_s() -> float:
    """Seconds since boot, suspend included: one clock for every process of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
