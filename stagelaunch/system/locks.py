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
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stagelaunch.core.errors import LockDirectoryError, LockTimeoutError
from stagelaunch.core.phases import LockMode
from stagelaunch.core.units import format_duration
from stagelaunch.system.letting_go import LettingGo
from stagelaunch.system.records import (
    PAUSE_FIRST_S,
    PAUSE_GROWTH,
    PAUSE_MAX_S,
    LockFile,
    Record,
    boottime_s,
    checked_uuid,
    find_records,
)

# fmt: off
NETWORK_FS_TYPES = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gcsfuse", "gfs2", "glusterfs", "gpfs", "juicefs",
    "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "rclone", "s3fs", "smb2", "smb3", "smbfs",
    "sshfs", "virtiofs",
})
# fmt: on
"""Where flock is per machine, emulated, or lost on a reconnect. A ``fuse.`` prefix is dropped before looking."""

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
    return _read_records(Path(directory), checked_uuid(device_uuid), "holder")


def waiters(directory: os.PathLike[str], device_uuid: str) -> tuple[Holder, ...]:
    """Who waits for the lock of a device now, longest first."""
    return _read_records(Path(directory), checked_uuid(device_uuid), "waiter")


def sweep(directory: os.PathLike[str], device_uuid: str, dead_pids: Collection[int]) -> None:
    """Remove what processes that were ours and are dead left beside the lock of a device.

    They would go when somebody looks for holders; this leaves nothing for later.
    """
    marks = tuple(f".{pid}." for pid in dead_pids)
    pattern = f"{checked_uuid(device_uuid)}.*.*.*"
    # Neither is worth an error: a directory that cannot be read now, for want of descriptors, or a file that stays.
    with suppress(OSError):
        for path in Path(directory).glob(pattern):
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
        self._uuids = tuple(sorted({checked_uuid(uuid) for uuid in device_uuids}))
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
        self.since_s = boottime_s()
        self.announced: set[str] = set()

    def take(self, uuid: str, held: ExitStack) -> None:
        """Lock one device. Whatever is taken is on ``held`` before it is taken, so no interrupt can lose it."""
        # The first to be taken, the last to be given back, which takes its time: nobody may wait for that.
        letting_go = LettingGo()
        held.callback(letting_go.close)
        gate = LockFile(gate_path(self.directory, uuid))
        held.callback(gate.release)
        self._lock(gate, fcntl.LOCK_EX, uuid, letting_go)
        data = LockFile(data_path(self.directory, uuid))
        held.callback(data.release)
        exclusive = self.mode is LockMode.EXCLUSIVE
        self._lock(data, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, uuid, letting_go)
        if exclusive:
            # Whatever record is left can only be of the dead: look, and with that remove them.
            holders(self.directory, uuid)
        record = self._record(uuid, "holder", boottime_s())
        held.callback(record.close)
        record.publish()
        if not exclusive:
            gate.release()

    def _lock(self, file: LockFile, operation: int, uuid: str, letting_go: LettingGo) -> None:
        if file.attempt(operation):
            return
        with ExitStack() as waiting:
            record = self._record(uuid, "waiter", self.since_s)
            waiting.callback(record.close)
            record.publish()
            # From before the next try on: whoever lets go until then lets that try succeed.
            letting_go.listen(file.path)
            waiting.callback(letting_go.ignore)
            self._announce(uuid)
            pause_s = PAUSE_FIRST_S
            while (left_s := self.deadline_s - self.clock()) > 0:
                heard = letting_go.wait(min(pause_s, left_s))
                if file.attempt(operation):
                    return
                # The lock of a process that is dying goes a moment after its file: then look again soon.
                pause_s = PAUSE_FIRST_S if heard else min(pause_s * PAUSE_GROWTH, PAUSE_MAX_S)
        raise LockTimeoutError(self._timeout_text(uuid))

    def _announce(self, uuid: str) -> None:
        if self.on_wait is not None and uuid not in self.announced:
            self.announced.add(uuid)
            self.on_wait(holders(self.directory, uuid))

    def _record(self, uuid: str, role: _Role, since_s: float) -> Record:
        fields = {"device_uuid": uuid, "pid": os.getpid(), "owner": self.owner, "phase": self.phase}
        fields |= {"mode": self.mode, "since_s": since_s}
        return Record(self.directory, uuid, role, fields)

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


def _read_records(directory: Path, uuid: str, role: _Role) -> tuple[Holder, ...]:
    found = filter(None, (_holder(record.fields) for record in find_records(directory, uuid, role)))
    return tuple(sorted(found, key=lambda holder: -holder.age_s))


def _holder(fields: dict[str, Any]) -> Holder | None:
    try:
        age_s = max(0.0, boottime_s() - fields.pop("since_s"))
        if not _is_plausible(fields):
            return None
        return Holder(**fields | {"mode": LockMode(fields["mode"]), "age_s": age_s})
    except (ValueError, KeyError, TypeError):
        return None


def _is_plausible(fields: dict[str, Any]) -> bool:
    """Whether what anyone may have written is fit to be shown on a terminal."""
    texts = [fields["owner"], fields["phase"], fields["device_uuid"]]
    pid = fields["pid"]
    return type(pid) is int and 0 < pid < 2**31 and all(isinstance(t, str) and t.isprintable() for t in texts)
