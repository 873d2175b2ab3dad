"""The file of simulated devices among real processes. Synchronised on pipes and locks, never on time."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices import simlayout
from stagelaunch.devices.simfile import SimulatedFile, list_simulated_devices

OPEN = """
import fcntl, os, sys
from pathlib import Path
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices.simfile import SimulatedFile

def say(*words):
    print(*words, flush=True)

machine = SimulatedMachine(Path(sys.argv[1]), {0: int(sys.argv[2])}, 0)
"""

HOLD = OPEN + "file = SimulatedFile.open(machine); say(file.allocate(0, int(sys.argv[3]))); sys.stdin.readline()"


def machine_at(path: Path, total: int = 1000, context: int = 0) -> SimulatedMachine:
    return SimulatedMachine(path, {0: total}, context)


@pytest.fixture
def machine(tmp_path: Path) -> SimulatedMachine:
    return machine_at(tmp_path / "devices")


@pytest.fixture
def file(machine):
    opened = SimulatedFile.open(machine)
    yield opened
    opened.close()


def line(child) -> str:
    return child.stdout.readline().strip()


def test_capacity_is_never_exceeded_by_processes_that_race_for_it(spawn, machine, tmp_path):
    # Room for two holders. Each holder takes a permit of its own; a third one would find none.
    script = (
        OPEN
        + """
file = SimulatedFile.open(machine)
permits = [os.open(f"{sys.argv[1]}.permit{n}", os.O_RDWR | os.O_CREAT) for n in range(2)]

def take():
    for permit in permits:
        try:
            fcntl.flock(permit, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return permit
        except BlockingIOError:
            pass

say("ready")
sys.stdin.readline()
given = refused = broken = 0
while given < 500:
    if not file.allocate(0, 400):
        refused += 1
        continue
    given += 1
    permit = take()
    os.sched_yield()
    if permit is None:
        broken += 1
    else:
        fcntl.flock(permit, fcntl.LOCK_UN)
    file.free(0, 400)
say(given, refused, broken)
"""
    )
    children = [spawn(script, machine.path, 1000) for _ in range(4)]
    assert [line(child) for child in children] == ["ready"] * 4
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    given, refused, broken = (sum(column) for column in zip(*(map(int, line(child).split()) for child in children)))
    assert (given, broken) == (4 * 500, 0)
    assert refused > 0
    (info,) = list_simulated_devices(machine)
    assert info.free_bytes == 1000


def test_threads_of_one_process_exclude_each_other(file):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(file.allocate(0, 3)))
    with file._mutex():
        thread.start()
        # Alive however long one waits; without the lock between threads it is through long before.
        thread.join(0.2)
        assert answers == []
    thread.join()
    assert answers == [True]


def test_bytes_of_a_killed_process_come_back_while_it_is_still_a_zombie(spawn, machine, file):
    child = spawn(HOLD, machine.path, 1000, 700)
    assert line(child) == "True"
    assert file.free_bytes(0) == 300
    assert not file.allocate(0, 301)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert file.free_bytes(0) == 1000
    assert file.snapshot()[0].processes == ()
    assert file.allocate(0, 1000)


def test_the_snapshot_names_live_processes_and_adds_up(spawn, machine, file):
    child = spawn(HOLD, machine.path, 1000, 600)
    assert line(child) == "True"
    assert file.allocate(0, 50)
    again = SimulatedFile.open(machine)
    assert again.allocate(0, 7)
    file.set_foreign_bytes(0, 100)
    (info,) = list_simulated_devices(machine)
    assert (info.index, info.total_bytes, info.free_bytes) == (0, 1000, 243)
    assert info.uuid == machine.uuid(0)
    held = {process.pid: process.size_bytes for process in info.processes}
    assert held == {child.pid: 600, os.getpid(): 57}
    assert all("py" in process.name for process in info.processes)
    again.close()


def test_processes_that_create_it_at_the_same_instant_share_one_file(spawn, machine, tmp_path):
    script = (
        OPEN
        + """
start = os.open(sys.argv[3], os.O_RDWR)
say("ready")
fcntl.flock(start, fcntl.LOCK_SH)
file = SimulatedFile.open(machine)
say(file.allocate(0, 10), os.stat(machine.path).st_ino)
sys.stdin.readline()
"""
    )
    gate = tmp_path / "gate"
    with gate.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        children = [spawn(script, machine.path, 1000, gate) for _ in range(6)]
        assert [line(child) for child in children] == ["ready"] * 6
    assert len({line(child) for child in children}) == 1
    (info,) = list_simulated_devices(machine)
    assert info.free_bytes == 1000 - 60
    assert {path.name for path in tmp_path.iterdir()} == {"gate", "devices"}


def test_who_creates_it_too_late_takes_what_is_there(machine):
    SimulatedFile.open(machine).close()
    before = machine.path.stat().st_ino
    simlayout.publish(machine.path, simlayout.file_image({0: 5}, 0), replace=False)
    assert machine.path.stat().st_ino == before
    assert [path.name for path in machine.path.parent.iterdir()] == ["devices"]


def test_a_forked_child_neither_uses_nor_keeps_alive_its_parents_slot(spawn, machine, file):
    script = (
        OPEN
        + """
file = SimulatedFile.open(machine)
file.allocate(0, 600)
if os.fork() == 0:
    try:
        file.allocate(0, 1)
    except RuntimeError as error:
        say(os.getpid(), error)
    else:
        say(os.getpid(), "allowed")
    sys.stdin.readline()
    mine = SimulatedFile.open(machine)
    say(mine.allocate(0, 30), mine.free_bytes(0))
    sys.stdin.readline()
    os._exit(0)
os.wait()
"""
    )
    parent = spawn(script, machine.path, 1000)
    child_pid, _, refusal = line(parent).partition(" ")
    assert "opened before a fork" in refusal
    assert file.free_bytes(0) == 400
    parent.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child_pid}").exists()
    assert file.free_bytes(0) == 1000
    parent.stdin.write("go\n")
    parent.stdin.flush()
    assert line(parent) == "True 970"
    parent.stdin.write("end\n")
    parent.stdin.flush()


def test_a_stopped_process_that_holds_the_mutex_is_named_in_time(spawn, machine):
    script = OPEN + "file = SimulatedFile.open(machine)\nwith file._mutex(): say('held'); sys.stdin.readline()"
    child = spawn(script, machine.path, 1000)
    assert line(child) == "held"
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(NoDeviceError, match=rf"pid {child.pid} did not let go within .*continue or end"):
        list_simulated_devices(machine, timeout_s=0.05)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert list_simulated_devices(machine)[0].free_bytes == 1000


def test_foreign_bytes_take_room_even_beyond_the_capacity(file):
    file.set_foreign_bytes(0, 990)
    assert file.allocate(0, 10)
    assert not file.allocate(0, 1)
    file.set_foreign_bytes(0, 5000)
    assert file.free_bytes(0) == 0
    assert not file.allocate(0, 0)
    file.set_foreign_bytes(0, 0)
    assert file.free_bytes(0) == 990


def test_slots_of_the_dead_are_used_again(machine, file):
    for _ in range(simlayout.SLOT_COUNT + 5):
        other = SimulatedFile.open(machine)
        assert other.allocate(0, 1000)
        other.close()
    assert file.free_bytes(0) == 1000


def test_a_process_too_many_is_refused(machine):
    files = [SimulatedFile.open(machine) for _ in range(simlayout.SLOT_COUNT + 1)]
    try:
        assert all(file.allocate(0, 1) for file in files[:-1])
        with pytest.raises(NoDeviceError, match="all 128 process slots are taken"):
            files[-1].allocate(0, 1)
    finally:
        for file in files:
            file.close()


@pytest.mark.parametrize("other", [machine_at(Path(), 500), machine_at(Path(), 1000, context=1)])
def test_a_file_of_other_capacities_is_replaced_only_when_nobody_uses_it(spawn, machine, other):
    other = SimulatedMachine(machine.path, other.total_bytes, other.context_bytes)
    child = spawn(HOLD, machine.path, 1000, 1)
    assert line(child) == "True"
    with pytest.raises(NoDeviceError, match=rf"{machine.path}: pid {child.pid} uses them with other capacities; end"):
        SimulatedFile.open(other)
    with pytest.raises(NoDeviceError, match="other capacities"):
        list_simulated_devices(other)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert list_simulated_devices(other)[0].free_bytes == other.total_bytes[0]
    assert list_simulated_devices(machine)[0].total_bytes == 1000
    late = SimulatedFile.open(machine)
    file = SimulatedFile.open(other)
    assert file.total_bytes(0) == other.total_bytes[0]
    with pytest.raises(NoDeviceError, match="was replaced by one of other capacities; restart"):
        late.allocate(0, 1)
    late.close()
    file.close()


def test_the_file_is_everybodys_whatever_the_umask(machine):
    mask = os.umask(0o077)
    try:
        SimulatedFile.open(machine).close()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(machine.path.stat().st_mode) == 0o666


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def _other_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda path: path.write_text("name: not ours\n"), "is not a file of simulated devices"),
        (lambda path: path.write_bytes(b""), "is not a file of simulated devices"),
        (_cut, "is damaged"),
        (_other_version, "another version of stagelaunch"),
    ],
)
def test_a_damaged_or_strange_file_is_refused_and_left_alone(machine, harm, text):
    SimulatedFile.open(machine).close()
    harm(machine.path)
    before = machine.path.read_bytes()
    with pytest.raises(NoDeviceError, match=f"cannot use simulated devices {machine.path}: .*{text}.*; remove it"):
        SimulatedFile.open(machine)
    assert machine.path.read_bytes() == before


@pytest.mark.parametrize("place", ["a directory", "a fifo", "below a file"])
def test_a_place_that_cannot_be_a_file_is_refused(tmp_path, place):
    path = tmp_path / "devices"
    if place == "a directory":
        path.mkdir()
    elif place == "a fifo":
        os.mkfifo(path)
    else:
        path.write_text("")
        path /= "deeper"
    with pytest.raises(NoDeviceError, match=f"{path}"):
        SimulatedFile.open(machine_at(path))


def test_listing_creates_nothing(machine):
    assert list_simulated_devices(machine)[0].free_bytes == 1000
    assert not machine.path.exists()


def test_mistakes_of_the_caller_are_refused(file):
    with pytest.raises(NoDeviceError, match=r"simulated device 7 of .*; name one of those that are there: 0"):
        file.allocate(7, 1)
    with pytest.raises(ValueError, match="cannot free 5 bytes"):
        file.free(0, 5)
    with pytest.raises(ValueError, match="cannot allocate -1"):
        file.allocate(0, -1)
    file.close()
    file.close()
    with pytest.raises(RuntimeError, match="is closed"):
        file.free_bytes(0)


def test_opening_and_closing_leaks_no_descriptor(machine):
    SimulatedFile.open(machine).close()
    before = os.listdir("/proc/self/fd")
    for _ in range(20):
        SimulatedFile.open(machine).close()
        with pytest.raises(NoDeviceError):
            SimulatedFile.open(machine_at(machine.path.parent))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_an_injected_error_is_seen_by_every_process(machine, file):
    other = SimulatedFile.open(machine)
    other.set_error(0, 700)
    assert file.error(0) == 700
    other.close()
