"""The device lock between real processes on real files. Only readers' holds are timed; all else waits on pipes."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import select
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stagelaunch.core.errors import LockDirectoryError, LockTimeoutError
from stagelaunch.core.phases import LockMode
from stagelaunch.system.letting_go import LettingGo
from stagelaunch.system.locks import (
    DeviceLocks,
    Holder,
    LockDirectory,
    data_path,
    gate_path,
    holders,
    mounted_fs_type,
    sweep,
    waiters,
)

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("lock_child.py")
GPU = "GPU-0a"
ANSWER_S = 30.0
"""Far above anything a child needs; only a hang reaches it."""
HOLD_S = 0.25
NOBODY = 65534


class Child:
    """A lock_child.py process."""

    def __init__(self, directory: Path, uuids: str, owner: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), str(directory), uuids, owner, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.pid = self.process.pid
        self._buffer = b""

    def tell(self, *command: Any) -> None:
        self.stdin.write(json.dumps(command).encode() + b"\n")
        self.stdin.flush()

    def hear(self) -> list[Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                assert selector.select(ANSWER_S), f"pid {self.pid} said nothing in {ANSWER_S} s"
                chunk = os.read(self.stdout.fileno(), 65536)
                assert chunk, f"pid {self.pid} ended: {self.process.poll()}"
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: list[Any] = json.loads(line)
        return event

    def expect(self, name: str) -> list[Any]:
        event = self.hear()
        assert event[0] == name, event
        return event[1:]

    def count_until(self, name: str) -> int:
        """How many other events came first."""
        return next(count for count in itertools.count() if self.hear()[0] == name)

    def hold(self, mode: str, phase: str = "profile", timeout_s: float = ANSWER_S) -> Child:
        self.tell("hold", mode, phase, timeout_s)
        self.expect("held")
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)

    def close(self) -> None:
        self.stdin.close()
        try:
            self.process.wait(ANSWER_S)
        finally:
            self.kill()
            with self.stdout:
                # End of file: no child of the child is left.
                assert select.select([self.stdout], [], [], ANSWER_S)[0]
                self.stdout.read()


Spawn = Callable[..., Child]


@pytest.fixture
def directory() -> Iterator[LockDirectory]:
    # Not tmp_path: its parents are closed to other users.
    parent = Path(tempfile.mkdtemp(prefix="stagelaunch-locks-"))
    parent.chmod(0o755)
    yield LockDirectory(parent / "locks")
    shutil.rmtree(parent)


@pytest.fixture
def spawn(directory: LockDirectory) -> Iterator[Spawn]:
    descriptors = os.listdir("/proc/self/fd")
    with ExitStack() as children:

        def start(uuids: str = GPU, owner: str = "omni/talker", *options: str) -> Child:
            child = Child(directory.path, uuids, owner, *options)
            children.callback(child.close)
            child.expect("up")
            return child

        yield start
    assert os.listdir("/proc/self/fd") == descriptors
    assert records(directory) == []


def mine(directory: LockDirectory, *uuids: str) -> DeviceLocks:
    return DeviceLocks(directory, uuids or (GPU,), owner="omni/thinker")


def can_hold(directory: LockDirectory, mode: LockMode, uuid: str = GPU) -> bool:
    try:
        with mine(directory, uuid).hold(mode, phase="test", timeout_s=0):
            return True
    except LockTimeoutError:
        return False


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def records(directory: LockDirectory) -> list[str]:
    return [name for name in os.listdir(directory) if re.search(r"\.(holder|waiter)\.", name)]


# Shared and exclusive


def test_shared_holds_overlap(directory: LockDirectory, spawn: Spawn) -> None:
    first, second = spawn().hold("shared"), spawn().hold("shared")
    assert {holder.pid for holder in holders(directory, GPU)} == {first.pid, second.pid}
    assert can_hold(directory, LockMode.SHARED)
    assert not can_hold(directory, LockMode.EXCLUSIVE)


def test_an_exclusive_hold_is_alone(directory: LockDirectory, spawn: Spawn) -> None:
    first, second = spawn().hold("exclusive"), spawn()
    assert not can_hold(directory, LockMode.SHARED)
    second.tell("hold", "exclusive", "profile", ANSWER_S)
    second.expect("waiting")
    assert [waiter.pid for waiter in waiters(directory, GPU)] == [second.pid]
    first.tell("release")
    (left_s,) = first.expect("released")
    (entered_s,) = second.expect("held")
    assert entered_s >= left_s
    assert [holder.pid for holder in holders(directory, GPU)] == [second.pid]
    assert waiters(directory, GPU) == ()


def test_no_lock_touches_nothing(directory: LockDirectory) -> None:
    with mine(directory).hold(LockMode.NONE, phase="import", timeout_s=0):
        assert os.listdir(directory) == []


def test_one_object_is_not_reentrant_and_usable_again(directory: LockDirectory) -> None:
    locks = mine(directory)
    with locks.hold(LockMode.SHARED, phase="load", timeout_s=0):
        with (
            pytest.raises(RuntimeError, match="the same object"),
            locks.hold(LockMode.SHARED, phase="x", timeout_s=0),
        ):
            pass
        assert can_hold(directory, LockMode.SHARED)
    with locks.hold(LockMode.EXCLUSIVE, phase="profile", timeout_s=0):
        pass


def test_the_body_that_raises_releases(directory: LockDirectory) -> None:
    with pytest.raises(KeyboardInterrupt), mine(directory).hold(LockMode.EXCLUSIVE, phase="x", timeout_s=0):
        raise KeyboardInterrupt
    assert can_hold(directory, LockMode.EXCLUSIVE)
    assert records(directory) == []


def test_processes_with_devices_in_any_order_never_deadlock(directory: LockDirectory, spawn: Spawn) -> None:
    (directory.path / "page").write_bytes(bytes(64))
    children = [spawn("GPU-a,GPU-b,GPU-c", f"p{slot}") for slot in range(4)]
    for slot, child in enumerate(children):
        child.tell("rounds", slot, 50, 20.0)
    assert [child.expect("rounds") for child in children] == [[0]] * 4


# Fairness


def staggered_readers(spawn: Spawn, *options: str) -> list[Child]:
    """Three readers that re-take at once and whose holds overlap, each in at least its second hold."""
    readers = [spawn(GPU, f"reader/{i}", *options) for i in range(3)]
    for i, reader in enumerate(readers):
        reader.tell("loop", HOLD_S * (i + 1) / 3, HOLD_S)
    for reader in readers:
        reader.expect("cycle")
        reader.expect("cycle")
    return readers


def stop_readers(readers: list[Child]) -> list[int]:
    """How often each reader had taken the lock meanwhile."""
    for reader in readers:
        reader.tell("stop")
    return [reader.count_until("stopped") for reader in readers]


def test_a_writer_gets_in_within_one_and_a_half_holds(
    directory: LockDirectory, spawn: Spawn, record_property: Callable[[str, object], None]
) -> None:
    readers = staggered_readers(spawn)
    waits_s = []
    for _ in range(4):
        began_s = time.monotonic()
        with mine(directory).hold(LockMode.EXCLUSIVE, phase="profile", timeout_s=ANSWER_S):
            waits_s.append(time.monotonic() - began_s)
        for reader in readers:
            reader.expect("cycle")
    stop_readers(readers)
    print("writer wait / hold:", [round(wait_s / HOLD_S, 2) for wait_s in waits_s])
    record_property("writer_wait_s", waits_s)
    assert max(waits_s) < 1.5 * HOLD_S


def test_without_the_gate_the_writer_starves(directory: LockDirectory, spawn: Spawn) -> None:
    readers = staggered_readers(spawn, "ungated")
    with (
        pytest.raises(LockTimeoutError),
        mine(directory).hold(LockMode.EXCLUSIVE, phase="profile", timeout_s=8 * HOLD_S),
    ):
        pass
    assert min(stop_readers(readers)) >= 5


def test_hand_over_is_prompt(
    spawn: Spawn, record_property: Callable[[str, object], None], directory: LockDirectory
) -> None:
    holder, waiter = spawn(), spawn()
    latencies_s = []
    holder.hold("exclusive")
    for _ in range(20):
        waiter.tell("hold", "exclusive", "profile", ANSWER_S)
        waiter.expect("waiting")
        holder.tell("release")
        (left_s,) = holder.expect("released")
        (entered_s,) = waiter.expect("held")
        latencies_s.append(entered_s - left_s)
        holder, waiter = waiter, holder
    median_s = statistics.median(latencies_s)
    print(f"hand-over: median {median_s * 1e3:.1f} ms, worst {max(latencies_s) * 1e3:.1f} ms")
    record_property("hand_over_s", latencies_s)
    assert median_s < 0.05


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_whoever_waits_is_told_and_does_not_only_look_now_and_then(
    directory: LockDirectory, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    for pause in ("PAUSE_FIRST_S", "PAUSE_MAX_S"):
        monkeypatch.setattr(f"stagelaunch.system.locks.{pause}", ANSWER_S)
    holder = spawn().hold(mode)

    def let_go(_: object) -> None:
        holder.tell("release")

    began_s = time.monotonic()
    with mine(directory).hold(LockMode.EXCLUSIVE, phase="profile", timeout_s=2 * ANSWER_S, on_wait=let_go):
        assert time.monotonic() - began_s < ANSWER_S / 2


def test_without_inotify_it_looks_now_and_then(
    directory: LockDirectory, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exhausted:
        def inotify_init1(self, flags: int) -> int:
            return -1

    monkeypatch.setattr("stagelaunch.system.letting_go._libc", Exhausted)
    holder = spawn().hold("exclusive")
    with mine(directory).hold(
        LockMode.SHARED, phase="load", timeout_s=ANSWER_S, on_wait=lambda _: holder.tell("release")
    ):
        pass


# Death and forks


@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_kill_9_frees_the_lock_and_voids_the_record(directory: LockDirectory, spawn: Spawn, mode: str) -> None:
    victim = spawn().hold(mode)
    assert [holder.pid for holder in holders(directory, GPU)] == [victim.pid]
    victim.kill()
    assert len(records(directory)) == 1
    with mine(directory).hold(LockMode.EXCLUSIVE, phase="profile", timeout_s=5):
        (name,) = records(directory)
        assert f".holder.{os.getpid()}." in name


def test_a_record_with_the_pid_of_another_live_process_is_stale(directory: LockDirectory, spawn: Spawn) -> None:
    victim = spawn().hold("shared")
    (name,) = records(directory)
    victim.kill()
    record = directory.path / name
    record.write_text(record.read_text().replace(str(victim.pid), str(os.getpid())))
    assert holders(directory, GPU) == ()
    assert records(directory) == []


@pytest.mark.parametrize("fork", ["fork", "libc_fork"])
@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_a_forked_child_does_not_keep_the_lock(directory: LockDirectory, spawn: Spawn, mode: str, fork: str) -> None:
    holder = spawn().hold(mode)
    holder.tell(fork)
    (grandchild,) = holder.expect("forked")
    holder.tell("release")
    holder.expect("released")
    os.kill(grandchild, 0)
    assert can_hold(directory, LockMode.EXCLUSIVE)


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent(directory: LockDirectory, spawn: Spawn) -> None:
    holder = spawn().hold("exclusive")
    holder.tell("fork")
    (grandchild,) = holder.expect("forked")
    holder.kill()
    with mine(directory).hold(LockMode.EXCLUSIVE, phase="profile", timeout_s=5):
        os.kill(grandchild, 0)


def test_a_forked_child_that_leaves_the_block_does_not_free_the_lock(directory: LockDirectory, spawn: Spawn) -> None:
    holder = spawn().hold("exclusive")
    holder.tell("fork_and_leave")
    holder.expect("forked")
    assert is_locked(gate_path(directory.path, GPU))
    assert is_locked(data_path(directory.path, GPU))
    assert [found.pid for found in holders(directory, GPU)] == [holder.pid]


# Waiting and giving up


def test_a_timeout_names_the_holder_and_leaves_nothing_locked(directory: LockDirectory, spawn: Spawn) -> None:
    holder = spawn("GPU-b").hold("shared", "load")
    heard: list[tuple[Holder, ...]] = []
    with (
        pytest.raises(LockTimeoutError) as caught,
        mine(directory, "GPU-b", "GPU-a").hold(
            LockMode.EXCLUSIVE, phase="profile", timeout_s=0.05, on_wait=heard.append
        ),
    ):
        pass
    assert re.fullmatch(
        r"cannot take the exclusive lock of device GPU-b for omni/thinker, phase profile, within 0\.05s: held by"
        rf" pid {holder.pid} \(omni/talker\) in phase load, shared, for \d+\.\d\ds;"
        r" wait for the holder, stop it, or raise the lock timeout",
        str(caught.value),
    )
    ((named,),) = heard
    assert (named.pid, named.phase, named.mode) == (holder.pid, "load", LockMode.SHARED)
    assert not is_locked(gate_path(directory.path, "GPU-a"))
    assert not is_locked(data_path(directory.path, "GPU-a"))
    assert not is_locked(gate_path(directory.path, "GPU-b"))
    assert len(records(directory)) == 1


def test_a_timeout_names_every_holder_and_who_waits_too(directory: LockDirectory, spawn: Spawn) -> None:
    first, second, writer = spawn().hold("shared"), spawn().hold("shared"), spawn(GPU, "omni/code2wav")
    writer.tell("hold", "exclusive", "profile", ANSWER_S)
    writer.expect("waiting")
    with (
        pytest.raises(LockTimeoutError) as caught,
        mine(directory).hold(LockMode.SHARED, phase="load", timeout_s=0),
    ):
        pass
    held, _, waiting = str(caught.value).partition("(waiting too: ")
    assert f"pid {first.pid} " in held
    assert f"pid {second.pid} " in held
    assert f"pid {writer.pid} (omni/code2wav) in phase profile, exclusive" in waiting
    for reader in (first, second):
        reader.tell("release")
    writer.expect("held")


def test_ctrl_c_while_waiting_releases_what_was_taken(directory: LockDirectory, spawn: Spawn) -> None:
    spawn("GPU-b").hold("exclusive")
    waiter = spawn("GPU-a,GPU-b")
    waiter.tell("hold", "exclusive", "profile", ANSWER_S)
    waiter.expect("waiting")
    assert not can_hold(directory, LockMode.SHARED, "GPU-a")
    waiter.process.send_signal(signal.SIGINT)
    waiter.expect("interrupted")
    assert can_hold(directory, LockMode.EXCLUSIVE, "GPU-a")
    assert [holder.device_uuid for uuid in ("GPU-a", "GPU-b") for holder in holders(directory, uuid)] == ["GPU-b"]


def test_an_on_wait_that_raises_releases_what_was_taken(directory: LockDirectory, spawn: Spawn) -> None:
    spawn("GPU-b").hold("exclusive")

    def fail(_: tuple[Holder, ...]) -> None:
        raise OSError("the report pipe is gone")

    with (
        pytest.raises(OSError, match="report pipe"),
        mine(directory, "GPU-a", "GPU-b").hold(LockMode.SHARED, phase="x", timeout_s=5, on_wait=fail),
    ):
        pass
    assert can_hold(directory, LockMode.EXCLUSIVE, "GPU-a")


# The files


@pytest.mark.parametrize("path_of", [gate_path, data_path])
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "deleted"])
def test_a_waiter_follows_the_path_when_its_file_goes(
    directory: LockDirectory, spawn: Spawn, path_of: Callable[[Path, str], Path], replaced: bool
) -> None:
    path = path_of(directory.path, GPU)
    # A shared holder lets the waiter through the gate to the data file; an exclusive one keeps it at the gate.
    holder = spawn().hold("exclusive" if path_of is gate_path else "shared")
    waiter = spawn()
    waiter.tell("hold", "exclusive", "profile", ANSWER_S)
    waiter.expect("waiting")
    path.unlink()
    if replaced:
        path.touch()
    holder.tell("release")
    holder.expect("released")
    waiter.expect("held")
    assert is_locked(path)
    assert not can_hold(directory, LockMode.SHARED)


def test_a_file_replaced_between_open_and_lock_is_not_the_lock(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = data_path(directory.path, GPU)
    real = fcntl.flock
    replaced: list[str] = []

    def flock(fd: int, operation: int) -> None:
        named = os.readlink(f"/proc/self/fd/{fd}")
        if named == str(path) and not replaced:
            replaced.append(named)
            path.unlink()
            path.touch()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with mine(directory).hold(LockMode.EXCLUSIVE, phase="x", timeout_s=5):
        monkeypatch.undo()
        assert replaced
        assert is_locked(path)


def test_a_waiter_does_not_overtake_the_holder_of_a_replaced_file(
    directory: LockDirectory, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = spawn().hold("shared")
    path = data_path(directory.path, GPU)
    pauses: list[float] = []

    def pause(_: LettingGo, duration_s: float) -> bool:
        pauses.append(duration_s)
        if len(pauses) == 1:
            path.unlink()
            path.touch()
        if len(pauses) == 4:
            holder.tell("release")
            holder.expect("released")
        return False

    monkeypatch.setattr(LettingGo, "wait", pause)
    with mine(directory).hold(LockMode.EXCLUSIVE, phase="profile", timeout_s=ANSWER_S):
        assert len(pauses) >= 4
        assert is_locked(path)


def test_files_stay_after_release(directory: LockDirectory) -> None:
    assert can_hold(directory, LockMode.EXCLUSIVE)
    assert sorted(os.listdir(directory)) == [f"{GPU}.data", f"{GPU}.gate"]


def test_any_umask_gives_files_for_every_user(directory: LockDirectory, spawn: Spawn) -> None:
    directory.path.rmdir()
    spawn(GPU, "omni/talker", "umask").hold("exclusive")
    modes = {path.name: path.stat().st_mode & 0o7777 for path in directory.path.iterdir()}
    assert directory.path.stat().st_mode & 0o7777 == 0o1777
    assert modes.pop(f"{GPU}.gate") == modes.pop(f"{GPU}.data") == 0o666
    assert list(modes.values()) == [0o644]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as two users")
def test_two_users_share_a_lock(directory: LockDirectory, spawn: Spawn) -> None:
    directory.path.chmod(0o1777)
    os.chown(directory, 1, 1)
    stranger = spawn(GPU, "other/stage", "umask", "nobody").hold("exclusive")
    assert gate_path(directory.path, GPU).stat().st_uid == NOBODY
    assert not can_hold(directory, LockMode.SHARED)
    stranger.tell("release")
    stranger.expect("released")
    with mine(directory).hold(LockMode.EXCLUSIVE, phase="profile", timeout_s=0):
        stranger.tell("hold", "shared", "load", 0)
        assert str(os.getpid()) in str(stranger.expect("waiting"))
        stranger.expect("timeout")


@pytest.mark.parametrize("uuid", ["", ".hidden", "../GPU-0", "MIG-GPU-0/1/0", "a b", "GPU-0.holder.1"])
def test_a_uuid_that_is_no_file_name_is_refused(directory: LockDirectory, uuid: str) -> None:
    with pytest.raises(ValueError, match="cannot lock device"):
        mine(directory, uuid)
    with pytest.raises(ValueError, match="cannot lock device"):
        holders(directory, uuid)


@pytest.mark.parametrize("plant", ["symlink", "fifo", "directory"])
def test_a_planted_lock_file_is_an_error(directory: LockDirectory, tmp_path: Path, plant: str) -> None:
    path = gate_path(directory.path, GPU)
    match plant:
        case "symlink":
            path.symlink_to(tmp_path / "elsewhere")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    with pytest.raises(LockDirectoryError, match=re.escape(str(path))):
        can_hold(directory, LockMode.SHARED)
    assert os.listdir(tmp_path) == []


def test_records_that_are_no_records_are_ignored(directory: LockDirectory) -> None:
    good = {"device_uuid": GPU, "pid": 5, "owner": "x", "phase": "load", "mode": "shared", "since_s": 1.0}
    hostile = [{**good, "owner": "\x1b[2J"}, {**good, "phase": "a\nb"}, {**good, "pid": 2**80}, {**good, "owner": 7}]
    for number, text in enumerate(["", "[]", "{}", "nonsense", '{"since_s": "x"}', *map(json.dumps, hostile)]):
        path = directory.path / f"{GPU}.holder.1.{number}"
        path.write_text(text)
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert holders(directory, GPU) == ()
            assert path.exists()
    assert holders(directory, GPU) == ()
    assert records(directory) == []


# The directory


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda tmp: tmp / "file", "it is not a directory"),
        (lambda tmp: tmp / "file" / "locks", "cannot create it: Not a directory"),
        (lambda tmp: Path("/proc/stagelaunch"), "cannot create it: (No such file or directory|Permission denied)"),
        (lambda tmp: Path("/proc"), "cannot write to it: (No such file or directory|Permission denied)"),
    ],
    ids=["a file", "below a file", "cannot be made", "cannot be written"],
)
def test_a_directory_that_cannot_be_used_is_an_error(tmp_path: Path, make: Callable[[Path], Path], cause: str) -> None:
    (tmp_path / "file").touch()
    path = make(tmp_path)
    with pytest.raises(LockDirectoryError) as caught:
        LockDirectory(path)
    assert re.fullmatch(
        rf"cannot use lock directory {re.escape(str(path))}: {cause};"
        r" name a local directory that every user of this machine can write to \(mode 1777\)",
        str(caught.value),
    )


@pytest.mark.parametrize("fs_type", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "lustre", "afs"])
def test_a_network_file_system_is_refused_and_not_written_to(tmp_path: Path, fs_type: str) -> None:
    with pytest.raises(LockDirectoryError, match=rf"network file system \({re.escape(fs_type)}\)"):
        LockDirectory(tmp_path / "locks", fs_type_of=lambda _: fs_type)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fs_type", ["ext4", "tmpfs", "overlay", "fuse.fuse-overlayfs", None])
def test_a_local_file_system_is_used(tmp_path: Path, fs_type: str | None) -> None:
    LockDirectory(tmp_path / "locks", fs_type_of=lambda _: fs_type)
    assert (tmp_path / "locks").stat().st_mode & 0o7777 == 0o1777


def test_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    LockDirectory(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == 0o2770


@pytest.mark.parametrize(
    ("path", "fs_type"),
    [
        ("/", "ext4"),
        ("/run/lock/stagelaunch", "tmpfs"),
        ("/mnt/a b/locks", "nfs4"),
        ("/mnt/a bc", "ext4"),
        ("/mnt/twice/x", "9p"),
    ],
)
def test_the_longest_and_latest_mount_counts(tmp_path: Path, path: str, fs_type: str) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "30 27 0:30 / /run rw shared:5 master:1 - tmpfs tmpfs rw\n"
        "31 27 0:31 / /mnt/a\\040b rw - nfs4 server:/x rw\n"
        "32 27 0:32 / /mnt/twice rw - ext4 /dev/vdb rw\n"
        "33 27 0:33 / /mnt/twice rw - 9p host rw\n"
    )
    assert mounted_fs_type(Path(path), mountinfo) == fs_type


def test_an_unreadable_mount_table_says_nothing(tmp_path: Path) -> None:
    assert mounted_fs_type(Path("/"), tmp_path / "none") is None


def test_sweep_takes_what_dead_processes_left_and_nothing_else(tmp_path: Path) -> None:
    directory = LockDirectory(tmp_path / "locks")
    with DeviceLocks(directory, ["GPU-1"], owner="me").hold(LockMode.SHARED, phase="load", timeout_s=1):
        left = [directory.path / f"GPU-1.{role}.77.123" for role in ("holder", "waiter")]
        kept = directory.path / "GPU-1.waiter.777.123"
        for path in (*left, kept):
            path.touch()
        sweep(directory, "GPU-1", {77})
        assert not any(path.exists() for path in left)
        assert kept.exists()
        assert [holder.pid for holder in holders(directory, "GPU-1")] == [os.getpid()]
