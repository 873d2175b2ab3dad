"""Where a running deployment keeps its files, and the lock that lets only one supervisor own it.

RUNTIME/NAME/lock          held by the supervisor for life
RUNTIME/NAME/state.json    who it is, or how the last run ended
RUNTIME/NAME/control.sock  where it answers
RUNTIME/NAME/run.json      what its workers were told
RUNTIME/NAME/remembered.json  what boots have measured and learnt about their stages, for the next boot
RUNTIME/NAME/weights/STAGE.json  what each worker reads of the checkpoint
RUNTIME/NAME/error.json    why the last run failed, who failed first; not there when it did not
RUNTIME/NAME/timeline.json  when each stage did what in the last run that started one, as far as it was written
RUNTIME/NAME/stacks.log    the supervisor's threads, at each SIGQUIT
RUNTIME/NAME/imports.log   what libraries say while they are imported for all stages at once
RUNTIME/NAME/logs/STAGE.log   one per stage
    RUNTIME/NAME/supervisor.log   what a detached supervisor says
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from stagelaunch.core.errors import AlreadyRunningError, ConfigError, Fault
from stagelaunch.supervisor.own_run import OwnRun
from stagelaunch.system.process import boot_id, start_time
from stagelaunch.system.regular import read_regular
from stagelaunch.system.tree import read_process

WAITS = {"admitting": "its admission", "waiting": "device memory", "restarting": "its restart"}
"""States of a live supervisor that has no stage running."""

NAME_WAIT_S = 1.0
"""How long whoever finds a deployment claimed waits for the winner to have written down who it is."""
_NAME_POLL_S = 0.01


def default_runtime_dir() -> Path:
    """STAGELAUNCH_RUNTIME_DIR; else /run/stagelaunch for root; else the user's own runtime directory."""
    explicit = os.environ.get("STAGELAUNCH_RUNTIME_DIR")
    if explicit:
        return Path(explicit).absolute()
    if os.getuid() == 0:
        return Path("/run/stagelaunch")
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "stagelaunch" if base else Path(tempfile.gettempdir()) / f"stagelaunch-{os.getuid()}"


def default_simulated_file() -> Path:
    """STAGELAUNCH_SIMULATED_FILE; else the one file all simulated devices of the machine live in."""
    return Path(os.environ.get("STAGELAUNCH_SIMULATED_FILE") or "/dev/shm/stagelaunch-simulated-devices")


@dataclass(frozen=True)
class Runtime:
    """The paths of one deployment."""

    directory: Path
    run: OwnRun | None = None
    """Of the supervisor that uses it; None for a command that only looks, or a supervisor without a warden."""

    @classmethod
    def of(cls, name: str, base: Path | None = None) -> Runtime:
        """The runtime of the deployment ``name`` below ``base``, or below the default directory."""
        return cls((base or default_runtime_dir()) / name)

    @property
    def argument(self) -> str:
        """How to name the deployment to a command, so that it finds this very one."""
        name, base = self.directory.name, self.directory.parent
        return name if base == default_runtime_dir() else f"{name} --runtime-dir {base}"

    @property
    def lock(self) -> Path:
        """Held for as long as a supervisor lives."""
        return self.directory / "lock"

    @property
    def state(self) -> Path:
        """Who owns the deployment, or how its last run ended."""
        return self.directory / "state.json"

    @property
    def socket(self) -> Path:
        """Where the supervisor answers."""
        return self.directory / "control.sock"

    @property
    def run_file(self) -> Path:
        """What the workers were told."""
        return self.directory / "run.json"

    def weight_plan(self, stage: str) -> Path:
        """What a stage's worker reads of the checkpoint."""
        return self.directory / "weights" / f"{stage}.json"

    @property
    def remembered(self) -> Path:
        """What earlier boots have measured and learnt about their stages."""
        return self.directory / "remembered.json"

    @property
    def error(self) -> Path:
        """The failure of the last run that had one, as JSON."""
        return self.directory / "error.json"

    @property
    def timeline(self) -> Path:
        """When each stage did what, of the last run that started one."""
        return self.directory / "timeline.json"

    @property
    def stacks(self) -> Path:
        """Where SIGQUIT writes the stacks of the supervisor's threads."""
        return self.directory / "stacks.log"

    @property
    def imports_log(self) -> Path:
        """What libraries say while they are imported for all stages at once."""
        return self.directory / "imports.log"

    @property
    def logs(self) -> Path:
        """One file per stage."""
        return self.directory / "logs"

    @property
    def supervisor_log(self) -> Path:
        """What a detached supervisor says; beside the logs of the stages, whose names are free."""
        return self.directory / "supervisor.log"

    def log(self, stage: str) -> Path:
        """The log file of a stage."""
        return self.logs / f"{stage}.log"

    def create(self) -> None:
        """Make the directories, for their owner only. ConfigError when that cannot be."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True, mode=0o700)
            owner = self.directory.stat().st_uid
        except OSError as error:
            text = f"cannot use the runtime directory: {error.strerror}; set runtime_dir to one you can write"
            raise ConfigError((Fault(str(self.directory), None, None, text),)) from error
        if os.geteuid() not in (0, owner):
            text = f"cannot use the runtime directory: it is of another user (uid {owner}); set runtime_dir to your own"
            raise ConfigError((Fault(str(self.directory), None, None, text),))

    def clear_drafts(self) -> None:
        """Remove what processes that were killed while they wrote a file have left. For the deployment's owner."""
        for draft in [*self.directory.glob(".*.json.*"), *self.directory.glob("weights/.*.json.*")]:
            pid = draft.name.rpartition(".")[2]
            if pid.isdecimal() and read_process(int(pid)) is None:
                with suppress(OSError):
                    draft.unlink()

    @property
    def identity(self) -> str:
        """Names this directory among all of the machine, also when it was deleted and made again: a short hash."""
        # In another mount namespace the same path is another directory.
        namespace = os.stat("/proc/self/ns/mnt").st_ino
        return hashlib.sha256(f"{namespace}:{os.path.realpath(self.directory)}".encode()).hexdigest()[:32]

    def claim(self, lock: FileLock | None = None) -> FileLock:
        """Become the deployment's one supervisor. AlreadyRunningError names the process that is.

        ``lock``: one that is held but of a file that the path no longer names; it is taken anew.
        """
        if lock is None:
            lock = FileLock(self.lock)
        else:
            lock.release(force=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            owner = self._wait_for_owner() or "unknown"
            raise AlreadyRunningError(
                f"cannot start deployment {self.directory.name}: it is running already (supervisor pid {owner}); "
                f"stop it with `stagelaunch down {self.argument}`"
            ) from None
        except OSError as error:
            text = f"cannot be locked: {error.strerror}; remove it, or set runtime_dir to another directory"
            raise ConfigError((Fault(str(self.lock), None, None, text),)) from error
        return lock

    def write_state(self, state: str, **more: Any) -> None:
        """Record who we are and how far; replaced atomically, so that a reader never sees half."""
        body = {"state": state, "pid": os.getpid(), "start": start_time(os.getpid()), "boot": boot_id()}
        body |= {} if self.run is None else self.run.to_json()
        body |= more
        write_atomically(self.state, json.dumps(body))

    def read_state(self) -> dict[str, Any]:
        """What the last supervisor recorded; empty when there is nothing readable."""
        try:
            body = json.loads(read_regular(self.state))
        except (OSError, ValueError, RecursionError):
            return {}
        return body if isinstance(body, dict) else {}

    @property
    def waits_for(self) -> str | None:
        """What a live supervisor waits for that has started nothing yet; None when there is none, or it has."""
        if self.live_pid() is None:
            return None
        return WAITS.get(str(self.read_state().get("state")))

    def is_owned(self) -> bool:
        """Whether somebody holds the lock: without that the recorded owner is none, whatever its pid means now."""
        lock = FileLock(self.lock)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        except OSError:
            return False
        lock.release(force=True)
        return False

    def _wait_for_owner(self) -> int | None:
        deadline_s = time.monotonic() + NAME_WAIT_S
        while (pid := self.owner_pid()) is None and time.monotonic() < deadline_s:
            time.sleep(_NAME_POLL_S)
        return pid

    def live_pid(self) -> int | None:
        """The supervisor that runs now and has not ended its run."""
        return None if self.read_state().get("state") == "ended" else self.owner_pid()

    def owner_pid(self) -> int | None:
        """The process that wrote the state, if it lives, also when its run has ended: recorded pid, start time and
        boot id must all be those of a live process."""
        state = self.read_state()
        pid = state.get("pid")
        if not isinstance(pid, int) or state.get("boot") != boot_id():
            return None
        return pid if _lives(pid, state.get("start")) else None

    def owner_pidfd(self) -> int | None:
        """A descriptor of the warden, else of the supervisor, readable when the run is over; None where neither lives.

        Unlike a pid it cannot come to mean another process.
        """
        return self.warden_pidfd() or _open(self.owner_pid)

    def warden_pidfd(self) -> int | None:
        """A descriptor of the warden alone; None where none is recorded or lives."""
        return _open(self.live_warden)

    def live_warden(self) -> int | None:
        """The recorded run's warden, if it lives: it outlives its supervisor for as long as it clears up."""
        state = self.read_state()
        warden = state.get("warden")
        if not isinstance(warden, dict) or not isinstance(warden.get("pid"), int) or state.get("boot") != boot_id():
            return None
        pid: int = warden["pid"]
        return pid if _lives(pid, warden.get("start")) else None


def _open(find: Callable[[], int | None]) -> int | None:
    pid = find()
    if pid is None:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # Looked at again: between the look and the opening the number may have gone to another process.
    if find() == pid:
        return pidfd
    os.close(pidfd)
    return None


def _lives(pid: int, start: Any) -> bool:
    """Whether that very process runs. One that was killed may stay in the table: in a container nobody may reap it."""
    process = read_process(pid)
    return process is not None and process.start == start and not process.is_dead


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by a file with this text; a reader sees the old or the new one. OSError leaves the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def writable(directory: Path) -> Iterator[None]:
    """What cannot be written in the body is the fault of the runtime directory: ConfigError."""
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename or str(directory)
        text = f"cannot be written: {error.strerror}; make room there, or set runtime_dir to another directory"
        raise ConfigError((Fault(str(where), None, None, text),)) from error


def list_runtimes(base: Path | None = None) -> tuple[Runtime, ...]:
    """Every deployment that has left a state file, by name."""
    root = base or default_runtime_dir()
    return tuple(Runtime(state.parent) for state in sorted(root.glob("*/state.json")))
