"""A run's own corner of the cgroup v2 tree, where this user may make one: what is in it cannot leave by forking.

Standard library only: the warden uses it. Enables no controller, and only ever moves the process it is told. Every
call works on a best effort: without a writable cgroup the process tree has to do.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "stagelaunch-"
"""Of the directory of a run; the run id follows."""
_MOUNT_INFO, _OWN_CGROUP = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
_LOOK_AGAIN_S = 0.005
_FORGOTTEN_S = 60.0


def own_directory() -> Path | None:
    """The cgroup v2 directory this process is in; None where there is none, or it cannot be seen from here."""
    try:
        return locate(_MOUNT_INFO.read_text(), _OWN_CGROUP.read_text())
    except OSError:
        return None


def locate(mount_info: str, membership: str) -> Path | None:
    """Where the cgroup of a process is mounted, from its ``mountinfo`` and its ``cgroup`` file."""
    own = next((line[3:] for line in membership.splitlines() if line.startswith("0::/")), None)
    if own is None:
        return None
    for line in mount_info.splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.split()[:1] == ["cgroup2"]:
            root, place = map(_unescaped, mount.split()[3:5])
            with suppress(ValueError):
                # A container may see no more than its own part of the tree, mounted as the whole.
                return Path(place) / Path(own).relative_to(root)
    return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def create(run_id: str) -> Path | None:
    """Make the directory of a run below this process's own; None where that is not possible."""
    own = own_directory()
    if own is None:
        return None
    _remove_forgotten(own)
    directory = own / f"{PREFIX}{run_id}"
    try:
        directory.mkdir()
    except OSError:
        return None
    return directory


def _remove_forgotten(own: Path) -> None:
    """Empty directories of runs whose warden was killed. A run that lives, but has no stage now, makes its again."""
    for directory in own.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - directory.stat().st_mtime > _FORGOTTEN_S:
                _remove_now(directory)


def is_of(directory: Path, run_id: str) -> bool:
    """Whether this is, by its name and its kind, the directory of that run."""
    return directory.name == f"{PREFIX}{run_id}" and (directory / "cgroup.procs").exists()


def enter(directory: Path, pid: int) -> bool:
    """Put a process into this directory, made if need be. False where that is not possible; then it stays as it is."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / "cgroup.procs", str(pid))
    except OSError:
        with suppress(OSError):
            directory.rmdir()
        return False
    return True


def pids(directory: Path) -> tuple[int, ...]:
    """The processes in the directory and below it, as numbers of this PID namespace; none when it is gone."""
    found: list[int] = []
    for place in (*_below(directory), directory):
        with suppress(OSError):
            found += map(int, (place / "cgroup.procs").read_text().split())
    # 0 is one outside this namespace: it has no number here.
    return tuple(pid for pid in found if pid > 0)


def kill(directory: Path) -> None:
    """SIGKILL to everything in the directory and below it, at once."""
    with suppress(OSError):
        _write(directory / "cgroup.kill", "1")


def remove(directory: Path, timeout_s: float = 0.0) -> bool:
    """Remove the directory and those below it. False when processes keep it for longer than ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not _remove_now(directory):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


def _remove_now(directory: Path) -> bool:
    for place in (*_below(directory), directory):
        with suppress(OSError):
            place.rmdir()
    return not directory.exists()


def _below(directory: Path) -> list[Path]:
    """The directories below, the deepest first."""
    return [Path(place) for place, _, _ in os.walk(directory, topdown=False) if place != str(directory)]


def _write(path: Path, text: str) -> None:
    # Never O_CREAT: where this is no cgroup, an ordinary file must not come to be.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
