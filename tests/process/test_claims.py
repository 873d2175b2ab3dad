"""Claims between real processes: admitted one at a time, believed while their owner lives, seen by everybody."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from deployments import HERE, ROOT, Site, light_stage

from stagelaunch.core.claims import Claim
from stagelaunch.core.errors import LockDirectoryError, LockTimeoutError
from stagelaunch.core.inventory import simulated_uuid
from stagelaunch.system.claims import Share, admission_mutex, hold_claims, publish_member, read_claims
from stagelaunch.system.locks import LockDirectory, sweep
from stagelaunch.system.process import Identity

GPU = "GPU-0a"
UUID = simulated_uuid(0)
ROUNDS = 200
SHARE = {GPU: Share(400, 7)}


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    return LockDirectory(tmp_path / "locks")


def one_claim(directory: LockDirectory) -> Claim:
    (claim,) = read_claims(directory, GPU)
    return claim


def names(directory: os.PathLike[str]) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.count(".") >= 2)


# What is written and read


def test_a_claim_counts_with_its_members_until_it_is_let_go(directory: LockDirectory) -> None:
    with hold_claims(directory, "c1", "omni", {**SHARE, "GPU-0b": Share(5, 0)}):
        assert one_claim(directory) == Claim("c1", "omni", os.getpid(), 400, 7)
        member, unknown = publish_member(directory, GPU, "c1", 4242), publish_member(directory, GPU, "c1", None)
        assert one_claim(directory) == Claim("c1", "omni", os.getpid(), 400, 7, frozenset({4242}), True)
        assert [claim.claimed_bytes for claim in read_claims(directory, "GPU-0b")] == [5]
        assert {path.stat().st_mode & 0o7777 for path in directory.path.iterdir()} == {0o644}
        member.close()
        unknown.close()
        assert one_claim(directory).member_pids == frozenset()
    assert read_claims(directory, GPU) == ()
    assert os.listdir(directory) == []


def test_reading_creates_nothing(tmp_path: Path) -> None:
    assert read_claims(tmp_path / "locks", GPU) == ()
    assert os.listdir(tmp_path) == []


def test_the_devices_of_another_simulated_machine_are_others(directory: LockDirectory) -> None:
    with hold_claims(directory, "c1", "omni", SHARE, machine="/mine"):
        assert read_claims(directory, GPU) == read_claims(directory, GPU, "/yours") == ()
        assert len(read_claims(directory, GPU, "/mine")) == 1


def test_a_member_of_another_claim_is_not_counted(directory: LockDirectory) -> None:
    with hold_claims(directory, "c1", "omni", SHARE), contextlib.closing(publish_member(directory, GPU, "c2", 4242)):
        assert one_claim(directory).member_pids == frozenset()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as two users")
def test_a_member_that_a_stranger_wrote_is_not_counted(directory: LockDirectory) -> None:
    with hold_claims(directory, "c1", "omni", SHARE), contextlib.closing(publish_member(directory, GPU, "c1", 4242)):
        (path,) = directory.path.glob("*.member.*")
        assert one_claim(directory).member_pids == {4242}
        os.chown(path, 65534, 65534)
        assert one_claim(directory).member_pids == frozenset()


def test_a_claim_that_cannot_be_written_down_is_an_error_and_leaves_none(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.write_text

    def full(path: Path, text: str) -> int:
        if "GPU-0b" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", full)
    with (
        pytest.raises(LockDirectoryError, match="No space left"),
        hold_claims(directory, "c1", "omni", {**SHARE, "GPU-0b": Share(5, 0)}),
    ):
        pass
    with pytest.raises(LockDirectoryError, match="No space left"):
        publish_member(directory, "GPU-0b", "c1", 1)
    assert os.listdir(directory) == []


def write(directory: LockDirectory, text: str | bytes, role: str = "claim") -> Any:
    """A record with this text, locked by this process; the open file."""
    path = directory.path / f"{GPU}.{role}.1.{len(os.listdir(directory))}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    file = path.open("rb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def fields(**change: Any) -> str:
    whole = {"claim_id": "c", "deployment": "d", "claimed_bytes": 1, "unattributed_bytes": 0}
    return json.dumps({**whole, **asdict(Identity.of_self()), **change})


GARBAGE = [
    "",
    "[]",
    "{}",
    "nonsense",
    "[" * 4000,
    b"\xff",
    fields(claimed_bytes="many"),
    fields(claimed_bytes=-1),
    fields(claimed_bytes=True),
    fields(claimed_bytes=10**300),
    fields(claimed_bytes=1.5),
    fields(pid=2**40),
    fields(pid="1"),
    fields(start=None),
    fields(deployment="\x1b[2J"),
    fields(deployment=["d"]),
    fields(claim_id=7),
    fields(more="x" * 5000),
]


@pytest.mark.parametrize("role", ["claim", "member"])
def test_what_is_no_record_is_not_believed_and_harms_nothing(directory: LockDirectory, role: str) -> None:
    with ExitStack() as files, hold_claims(directory, "c", "omni", SHARE):
        for text in GARBAGE:
            files.enter_context(write(directory, text, role))
        path = directory.path / f"{GPU}.{role}.1.link"
        path.symlink_to(directory.path / "nowhere")
        os.mkfifo(directory.path / f"{GPU}.{role}.1.fifo")
        (directory.path / f"{GPU}.{role}.1.directory").mkdir()
        claim = one_claim(directory)
        assert (claim.deployment, claim.member_pids) == ("omni", frozenset())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_another_user_reads_a_claim_but_not_what_is_closed_to_it() -> None:
    # Not tmp_path: its parents are closed to other users.
    with tempfile.TemporaryDirectory(prefix="stagelaunch-claims-") as parent:
        os.chmod(parent, 0o755)
        directory = LockDirectory(Path(parent) / "locks")
        script = (
            "import os, sys; from stagelaunch.system.claims import read_claims\n"
            "os.setgid(65534); os.setuid(65534)\n"
            f"print([claim.deployment for claim in read_claims(sys.argv[1], {GPU!r})])"
        )
        with hold_claims(directory, "c", "omni", SHARE), write(directory, fields(deployment="closed")) as closed:
            os.fchmod(closed.fileno(), 0o600)
            command = [sys.executable, "-c", script, directory.path]
            seen = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
            )
        assert seen.stdout.strip() == "['omni']"


def test_records_that_cannot_be_read_for_want_of_descriptors_are_an_error(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    with hold_claims(directory, "c", "omni", SHARE):
        monkeypatch.setattr(os, "open", full)
        with pytest.raises(LockDirectoryError, match="Too many open files"):
            read_claims(directory, GPU)
        monkeypatch.undo()


# Who is dead


@pytest.mark.parametrize(
    ("change", "believed"),
    [
        ({}, True),
        ({"boot": "another"}, False),
        ({"start": 1}, False),
        ({"pid": 2**31 - 1}, False),
        # What cannot be judged from here is believed: its lock says that it lives.
        ({"pid": 2**31 - 1, "pid_namespace": 1}, True),
        ({"boot": "another", "pid_namespace": 1}, False),
    ],
)
def test_a_record_of_the_dead_is_ignored_and_removed_although_something_keeps_it_locked(
    directory: LockDirectory, change: dict[str, Any], believed: bool
) -> None:
    with write(directory, fields(**change)):
        assert [claim.deployment for claim in read_claims(directory, GPU)] == ["d"] * believed
        assert len(os.listdir(directory)) == believed
    assert read_claims(directory, GPU) == ()
    assert os.listdir(directory) == []


def test_an_owner_that_proc_hides_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = Identity.of_self()
    monkeypatch.setattr("stagelaunch.system.process.start_time", lambda pid: None)
    assert not identity.is_surely_dead()


def test_a_slow_reader_does_not_remove_the_record_made_again_after_a_fast_one(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory.path / f"{GPU}.claim.1.1"
    path.touch()
    real = fcntl.flock
    again: list[Any] = []

    def flock(fd: int, operation: int) -> None:
        if not again:
            # Between its opening and its locking the other reader removes the file, and the writer makes it again.
            path.unlink()
            again.append(None)
            again.append(write(directory, fields()))
            Path(again[1].name).rename(path)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    read_claims(directory, GPU)
    monkeypatch.undo()
    with again[1]:
        assert [claim.deployment for claim in read_claims(directory, GPU)] == ["d"]


def test_sweep_takes_what_a_dead_worker_left(directory: LockDirectory) -> None:
    for role in ("member", "claim"):
        (directory.path / f"{GPU}.{role}.77.123").touch()
    with hold_claims(directory, "c", "omni", SHARE):
        sweep(directory, GPU, {77})
        assert [name.split(".")[2] for name in names(directory)] == [str(os.getpid())]


# The mutex, and two at the same instant


def test_the_mutex_names_who_holds_it_and_is_free_again(directory: LockDirectory) -> None:
    async def scenario() -> str:
        async with admission_mutex(directory, "first", 1):
            with pytest.raises(LockTimeoutError) as caught:
                async with admission_mutex(directory, "second", 0.05):
                    pass
        async with admission_mutex(directory, "third", 0):
            return str(caught.value)

    text = asyncio.run(scenario())
    assert text.startswith("cannot admit deployment second within 0.05s: ")
    assert f"admission.lock is held by pid {os.getpid()} (first) in phase admission, exclusive, for " in text
    assert os.listdir(directory) == ["admission.lock"]


class Child:
    """An admission_child.py process."""

    def __init__(self, config: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "admission_child.py"), str(config), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}"},
            text=True,
        )
        self.pid = self.process.pid
        assert self.hear() == "up"

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a supervisor of a deployment that wants 0.6 of device 0; all share one machine."""
    with ExitStack() as children:

        def begin(name: str, *options: str) -> Child:
            child = Child(claimant_site(tmp_path, name).write(), *options)
            children.callback(child.close)
            return child

        yield begin


def claimant_site(place: Path, name: str, **stage: Any) -> Site:
    """A deployment of one stage that wants 0.6 of device 0 of the machine at ``place``."""
    site = Site(place / name)
    site.directory.mkdir(exist_ok=True)
    machine = {"devices": {0: "1GiB", 1: "1GiB"}, "file": str(place / "devices")}
    site.top = {"name": name, "lock_dir": str(place / "locks"), "simulated": machine}
    site.stages = [light_stage(0, "alpha", 0, utilization=0.6, **stage)]
    return site


def test_two_at_the_same_instant_are_never_both_admitted(start: Start, tmp_path: Path) -> None:
    children = [start("first"), start("second")]
    winners = set()
    for _ in range(ROUNDS):
        for child in children:
            child.tell("admit")
        answers = {child.hear().partition(" ")[0]: child for child in children}
        assert set(answers) == {"admitted", "refused"}
        winners.add(answers["admitted"].pid)
        answers["admitted"].tell("release")
        assert answers["admitted"].hear() == "released"
    assert winners <= {child.pid for child in children}
    assert names(tmp_path / "locks") == []


@pytest.mark.parametrize("mutex", [True, False])
def test_nobody_else_decides_between_a_decision_and_its_claim(start: Start, mutex: bool) -> None:
    options = ["window"] if mutex else ["window", "no_mutex"]
    first, second = start("first", *options), start("second", *options)
    first.tell("admit")
    assert first.hear() == "window"
    second.tell("admit")
    if not mutex:
        # The test of the test: without the mutex the second decides too, on what the first has not claimed yet.
        assert second.hear() == "window"
    first.tell("go on")
    assert first.hear() == "admitted"
    if mutex:
        refusal = second.hear()
        assert refusal.startswith("refused device 0: needs ")
        assert f"deployment first (supervisor pid {first.pid}) claims 630.40 MiB" in refusal
    else:
        second.tell("go on")
        assert second.hear() == "admitted"


@pytest.mark.parametrize("command", ["kill", "kill forked"])
def test_a_killed_supervisor_claims_nothing_any_more(start: Start, tmp_path: Path, command: str) -> None:
    first, second = start("first"), start("second")
    first.tell("admit")
    assert first.hear() == "admitted"
    second.tell("admit")
    assert second.hear().startswith("refused")
    first.tell(command)
    forked = int(first.hear()) if command == "kill forked" else None
    assert first.process.wait(30) == -signal.SIGKILL
    second.tell("admit")
    answer = second.hear()
    if forked is not None:
        os.kill(forked, signal.SIGKILL)
    assert answer == "admitted"
    assert [name.split(".")[2] for name in names(tmp_path / "locks")] == [str(second.pid)]
