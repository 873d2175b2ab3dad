"""The device lock: shared or exclusive, per device UUID, fair to whoever waits for the exclusive side.

Two files per device in one directory that every user of the machine shares, never deleted: ``UUID.gate`` and
``UUID.data``. shared: gate exclusively, data shared, gate released. exclusive: gate, data exclusively, both kept.
A plain flock starves its writer; here newcomers queue at the gate while the writer waits for the readers inside.
Beside them lies one small record per holder and per waiter, so that a timeout can say who is in the way.

Used by the worker around its phases, by status, doctor and the supervisor to name holders. It is not reentrant,
not a queue (writers at the gate are served in no set order) and not for network file systems.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stagelaunch.core.errors import LockDirectoryError, LockTimeoutError
from stagelaunch.core.phases import LockMode
from stagelaunch.core.units import format_duration

# fmt: off
NETWORK_FS_TYPES = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gcsfuse", "gfs2", "glusterfs", "gpfs", "juicefs",
    "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "rclone", "s3fs", "smb2", "smb3", "smbfs",
    "sshfs", "virtiofs",
})
# fmt: on
"""Where flock is per machine, emulated, or lost on a reconnect. A ``fuse.`` prefix is dropped before looking."""

_PAUSE_FIRST_S, _PAUSE_MAX_S, _PAUSE_GROWTH = 0.002, 0.010, 1.5
"""Polled, because a blocking flock takes no deadline. The last pause bounds the hand-over latency."""

_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:-]{0,127}")
# Anyone may write to the directory: never follow a planted link, never block on a planted FIFO.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_RECORD_BYTES = 4096
_Role = Literal["holder", "waiter"]


def mounted_fs_type(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the file system that ``path`` is or would be on; None where the kernel does not say."""
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return None
    real = Path(os.path.realpath(path))
    depth, found = -1, None
    for line in lines:
        left, _, right = line.partition(" - ")
        mount_point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split(" ")[4]))
        # ">=": of two mounts on one point the later one is on top.
        if real.is_relative_to(mount_point) and len(mount_point.parts) >= depth:
            depth, found = len(mount_point.parts), right.split(" ")[0]
    return found


class LockDirectory:
    """A directory that all users of this machine can lock in; LockDirectoryError otherwise, never another one."""

    def __init__(
        self, path: str | os.PathLike[str], *, fs_type_of: Callable[[Path], str | None] = mounted_fs_type
    ) -> None:
        self.path = Path(os.path.abspath(path))
        fs_type = fs_type_of(self.path)
        if fs_type is not None and fs_type.removeprefix("fuse.") in NETWORK_FS_TYPES:
            raise self._refusal(f"it is on a network file system ({fs_type}), where locks are not reliable")
        doing = "create it"
        try:
            self._create()
            doing = "write to it"
            # A write is the only honest test: root and read-only mounts make os.access lie.
            with tempfile.TemporaryFile(dir=self.path) as probe:
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileExistsError:
            raise self._refusal("it is not a directory") from None
        except OSError as error:
            raise self._refusal(f"cannot {doing}: {error.strerror or error}") from error

    def _create(self) -> None:
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            # An existing directory keeps its mode: the operator may have meant a group only.
            if not self.path.is_dir():
                raise
        else:
            self.path.chmod(0o1777)

    def _refusal(self, cause: str) -> LockDirectoryError:
        return LockDirectoryError(
            f"cannot use lock directory {self.path}: {cause};"
            " name a local directory that every user of this machine can write to (mode 1777)"
        )

    def __fspath__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class Holder:
    """One process that holds, or waits for, the lock of one device."""

    device_uuid: str
    pid: int
    """As the process itself sees it; another PID namespace numbers it differently."""
    owner: str
    phase: str
    mode: LockMode
    age_s: float
    """How long it had held or waited when this was read."""

    def __str__(self) -> str:
        age = format_duration(self.age_s)
        return f"pid {self.pid} ({self.owner}) in phase {self.phase}, {self.mode}, for {age}"


def holders(directory: os.PathLike[str], device_uuid: str) -> tuple[Holder, ...]:
    """Who holds the lock of a device now, longest first. Records of dead processes are dropped and removed."""
    return _read_records(Path(directory), _checked(device_uuid), "holder")


def waiters(directory: os.PathLike[str], device_uuid: str) -> tuple[Holder, ...]:
    """Who waits for the lock of a device now, longest first."""
    return _read_records(Path(directory), _checked(device_uuid), "waiter")


def sweep(directory: os.PathLike[str], device_uuid: str, dead_pids: Collection[int]) -> None:
    """Remove what processes that were ours and are dead left beside the lock of a device.

    They would go when somebody looks for holders; this leaves nothing for later.
    """
    marks = tuple(f".{pid}." for pid in dead_pids)
    for path in Path(directory).glob(f"{_checked(device_uuid)}.*.*.*"):
        if any(mark in path.name for mark in marks):
            with suppress(OSError):
                path.unlink()


class DeviceLocks:
    """The locks of one stage's devices, taken together: all of them or none, in UUID order, under one deadline."""

    def __init__(
        self,
        directory: LockDirectory,
        device_uuids: Sequence[str],
        *,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory.path
        # One order for everybody: no cycle of waiters, hence no deadlock.
        self._uuids = tuple(sorted({_checked(uuid) for uuid in device_uuids}))
        self._owner = owner
        self._clock = clock
        self._in_use = threading.Lock()

    @contextmanager
    def hold(
        self,
        mode: LockMode,
        *,
        phase: str,
        timeout_s: float,
        on_wait: Callable[[tuple[Holder, ...]], None] | None = None,
    ) -> Iterator[None]:
        """Hold every device in ``mode`` for the body. ``on_wait`` hears the holders once per device waited for.

        LockTimeoutError after ``timeout_s`` over all devices, with nothing left held. Do not fork in the body.
        """
        if mode is LockMode.NONE:
            yield
            return
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                f"cannot take the {mode} device lock for {self._owner}: the same object holds or awaits it already;"
                " leave the first hold, or use a DeviceLocks of its own"
            )
        try:
            request = _Request(self._directory, self._owner, mode, phase, timeout_s, self._clock, on_wait)
            with ExitStack() as held:
                for uuid in self._uuids:
                    request.take(uuid, held)
                yield
        finally:
            self._in_use.release()


@dataclass
class _Request:
    """One call of ``hold``: its deadline and what it says about itself."""

    directory: Path
    owner: str
    mode: LockMode
    phase: str
    timeout_s: float
    clock: Callable[[], float]
    on_wait: Callable[[tuple[Holder, ...]], None] | None

    def __post_init__(self) -> None:
        self.deadline_s = self.clock() + self.timeout_s
        self.since_s = _boottime_s()
        self.announced: set[str] = set()

    def take(self, uuid: str, held: ExitStack) -> None:
        """Lock one device. Whatever is taken is on ``held`` before it is taken, so no interrupt can lose it."""
        gate = _LockFile(gate_path(self.directory, uuid))
        held.callback(gate.release)
        self._lock(gate, fcntl.LOCK_EX, uuid)
        data = _LockFile(data_path(self.directory, uuid))
        held.callback(data.release)
        exclusive = self.mode is LockMode.EXCLUSIVE
        self._lock(data, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, uuid)
        if exclusive:
            # Whatever record is left can only be of the dead: look, and with that remove them.
            holders(self.directory, uuid)
        record = self._record(uuid, "holder", _boottime_s())
        held.callback(record.remove)
        record.publish()
        if not exclusive:
            gate.release()

    def _lock(self, file: _LockFile, operation: int, uuid: str) -> None:
        if file.attempt(operation):
            return
        with ExitStack() as waiting:
            record = self._record(uuid, "waiter", self.since_s)
            waiting.callback(record.remove)
            record.publish()
            self._announce(uuid)
            pause_s = _PAUSE_FIRST_S
            while (left_s := self.deadline_s - self.clock()) > 0:
                time.sleep(min(pause_s, left_s))
                if file.attempt(operation):
                    return
                pause_s = min(pause_s * _PAUSE_GROWTH, _PAUSE_MAX_S)
        raise LockTimeoutError(self._timeout_text(uuid))

    def _announce(self, uuid: str) -> None:
        if self.on_wait is not None and uuid not in self.announced:
            self.announced.add(uuid)
            self.on_wait(holders(self.directory, uuid))

    def _record(self, uuid: str, role: _Role, since_s: float) -> _Record:
        fields = {"device_uuid": uuid, "pid": os.getpid(), "owner": self.owner, "phase": self.phase}
        fields |= {"mode": self.mode, "since_s": since_s}
        return _Record(self.directory, uuid, role, json.dumps(fields))

    def _timeout_text(self, uuid: str) -> str:
        named = "; ".join(map(str, holders(self.directory, uuid))) or "a process that left no record"
        others = [str(waiter) for waiter in waiters(self.directory, uuid)]
        also = f" (waiting too: {'; '.join(others)})" if others else ""
        return (
            f"cannot take the {self.mode} lock of device {uuid} for {self.owner}, phase {self.phase}, within"
            f" {format_duration(self.timeout_s)}: held by {named}{also};"
            " wait for the holder, stop it, or raise the lock timeout"
        )


def gate_path(directory: Path, uuid: str) -> Path:
    """The file newcomers queue at."""
    return directory / f"{uuid}.gate"


def data_path(directory: Path, uuid: str) -> Path:
    """The file whose lock is the device lock."""
    return directory / f"{uuid}.data"


class _LockFile:
    """One flock on one path. ``release`` may be called at any time, any number of times.

    Not filelock, also not for the gate: 4.3 refuses another user's lock file in a sticky directory (its
    ``foreign_owner``), which is just what this directory is for, and checks for an unlinked file, not a replaced one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

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
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd))
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


_open_files: set[_LockFile] = set()


def _close_inherited() -> None:
    for file in tuple(_open_files):
        file.close()


# Forking while holding is wrong, but libraries do it: the child then neither keeps the lock nor frees it.
os.register_at_fork(after_in_child=_close_inherited)


class _Record:
    """Who holds or waits, in a file of its own; believed while its writer keeps it locked.

    The kernel drops that lock with the process, so no comparison of pids, start times and boots is needed, and
    a reader in another container (another PID namespace) judges it as well as anyone.
    """

    def __init__(self, directory: Path, uuid: str, role: _Role, text: str) -> None:
        self._pid = os.getpid()
        stamp = f"{self._pid}.{time.clock_gettime_ns(time.CLOCK_BOOTTIME)}"
        self._path = directory / f"{uuid}.{role}.{stamp}"
        self._text = text
        self._lock = _LockFile(self._path)

    def publish(self) -> None:
        """Put the record in place, locked. In place from the start: a draft would outlive a writer killed before it is
        renamed. Until it is whole, readers take it for none."""
        with _explained(self._path):
            # A reader may hold it for the instant in which it looks, or take it away as stale: then it is made again.
            while not self._lock.attempt(fcntl.LOCK_EX):
                time.sleep(_PAUSE_FIRST_S)
            self._path.write_text(self._text)
            self._path.chmod(0o644)

    def remove(self) -> None:
        """Take the record away, published or not. Does nothing in a forked child: it is the parent's."""
        if self._pid == os.getpid():
            with suppress(FileNotFoundError):
                self._path.unlink()
            self._lock.release()


def _read_records(directory: Path, uuid: str, role: _Role) -> tuple[Holder, ...]:
    prefix = f"{uuid}.{role}."
    try:
        names = [name for name in os.listdir(directory) if name.startswith(prefix)]
    except FileNotFoundError:
        return ()
    found = filter(None, (_read_record(directory / name) for name in names))
    return tuple(sorted(found, key=lambda holder: -holder.age_s))


def _read_record(path: Path) -> Holder | None:
    """The record, or None where it is stale (removed if this user may), gone, or not a record."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except OSError:
        return None
    try:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with suppress(OSError):
                path.unlink()
            return None
        fields = json.loads(os.read(fd, _RECORD_BYTES))
        age_s = max(0.0, _boottime_s() - fields.pop("since_s"))
        return Holder(**fields | {"mode": LockMode(fields["mode"]), "age_s": age_s})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    finally:
        os.close(fd)


def _checked(uuid: str) -> str:
    if _UUID.fullmatch(uuid) is None:
        raise ValueError(
            f"cannot lock device {uuid!r}: its UUID becomes a file name and may only have letters, digits, '-', '_'"
            " and ':'; pass the UUID as the inventory prints it"
        )
    return uuid


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
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LockDirectoryError(
            f"cannot use lock file {path}: {error.strerror or error};"
            " make its directory writable for every user (mode 1777) and its files readable, or name another"
        ) from error


def _boottime_s() -> float:
    """Seconds since boot, suspend included: one clock for every process of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
