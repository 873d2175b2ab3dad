"""The warden: whatever happens to the supervisor, nothing below survives; signals arrive, once; it works as PID 1."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from deployments import Ran, Site, light_stage
from wards import ROOT, WITHOUT_CGROUP, Ward, as_up_does, can_have_cgroup

from stagelaunch import warden
from stagelaunch.system import tree

KINDS = "plain,stopped,session,double,exec,titled,thread,tracker"
BY_ENVIRONMENT = {"session", "double", "exec"}
"""What has a session of its own, and an environment that says whose it is."""


@pytest.fixture
def begin() -> Iterator[Any]:
    """``Ward.begin``; all of it is ended afterwards."""
    with ExitStack() as stack:

        def start(*arguments: Any, **more: Any) -> Ward:
            ward = Ward.begin(*arguments, **more)
            stack.callback(ward.close)
            return ward

        yield start


@pytest.fixture(params=["cgroup", "tree"])
def changes(request: pytest.FixtureRequest) -> str:
    """With a cgroup, where this user can have one, and without."""
    if request.param == "cgroup" and not can_have_cgroup():
        pytest.skip("no writable cgroup v2 here")
    return "" if request.param == "cgroup" else WITHOUT_CGROUP


def shared_memory(ward: Ward) -> Path:
    return Path("/dev/shm") / next(line.split()[1] for line in ward.said if line.startswith("tracker "))


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_outlives_a_supervisor_that_ends_or_is_killed(begin: Any, changes: str, killed: bool) -> None:
    ward = begin(KINDS, "until SIGUSR1", changes=changes).until("ready")
    assert ward.living() == set(KINDS.split(",")) - {"tracker"} | {"supervisor"}
    assert (ward.cgroup is not None) is (changes == "")
    if killed:
        tree.send(ward.kin["supervisor"], signal.SIGKILL)
    else:
        ward.process.send_signal(signal.SIGUSR1)
    said = ward.stderr()
    assert ward.end() == (70 if killed else 0), said
    assert ("was killed by SIGKILL" in said) is killed
    # At the instant the warden is over, not some time later.
    assert ward.living() == set()
    assert f"innocent (pid {ward.kin['titled'].pid})" in said
    # Its resource tracker was not killed with the others, but left to do its work.
    assert not shared_memory(ward).exists()
    assert ward.cgroup is None or not ward.cgroup.exists()


def test_a_chain_of_processes_that_fork_and_end_is_caught(begin: Any, changes: str) -> None:
    ward = begin("chain", "exit 3", changes=changes)
    assert ward.end() == 3
    assert tree.find_run(next(line for line in ward.said if line.startswith("run "))[4:]) == ()
    assert "chain ended" not in ward.said


def test_what_outlives_the_warden_is_found_by_its_run_id(begin: Any, changes: str) -> None:
    ward = begin(KINDS, changes=changes).until("ready")
    ward.process.kill()
    assert ward.gone("supervisor")
    found = {process.pid for process in tree.find_run(ward.run_id)}
    assert {ward.kin[kind].pid for kind in BY_ENVIRONMENT} <= found
    assert ward.kin["titled"].pid not in found
    swept = tree.sweep(lambda table: tree.find_run(ward.run_id, table), 10)
    assert swept.left == ()
    assert ward.gone(*BY_ENVIRONMENT)


def test_warden_and_supervisor_killed_at_once_leave_no_more_than_that(begin: Any) -> None:
    ward = begin("session,double").until("ready")
    tree.send(ward.kin["supervisor"], signal.SIGKILL)
    ward.process.kill()
    assert ward.gone("supervisor")
    assert {process.pid for process in tree.find_run(ward.run_id)} == {ward.kin[k].pid for k in ("session", "double")}


@pytest.mark.parametrize("number", ["SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_signals_are_passed_on(begin: Any, number: str) -> None:
    ward = begin().until("ready")
    ward.process.send_signal(signal.Signals[number])
    ward.until(f"got {number}").process.terminate()
    assert (ward.end(), ward.said[-1]) == (0, "got SIGTERM")


def test_a_signal_in_the_first_instant_waits_until_it_can_be_taken(begin: Any) -> None:
    ward = begin()
    ward.process.terminate()
    assert (ward.end(), ward.said[-1]) == (0, "got SIGTERM")


def test_the_third_request_to_stop_kills_everything(begin: Any) -> None:
    ward = begin("session,stopped", "until SIGUSR1").until("ready")
    for number in (signal.SIGINT, signal.SIGTERM):
        ward.process.send_signal(number)
        ward.until(f"got {number.name}")
    ward.process.send_signal(signal.SIGINT)
    said = ward.stderr()
    assert (ward.end(), ward.living()) == (130, set())
    assert "device memory was not checked" in said


def test_a_stopped_supervisor_is_woken_to_stop(begin: Any) -> None:
    ward = begin().until("ready")
    supervisor = ward.kin["supervisor"]
    tree.send(supervisor, signal.SIGSTOP)
    while (now := tree.read_process(supervisor.pid)) is not None and now.state != "T":
        os.sched_yield()
    ward.process.terminate()
    assert ward.end() == 0


def test_what_cannot_be_killed_is_named_with_its_state(begin: Any) -> None:
    ward = begin("session", "until SIGTERM", changes=f"{WITHOUT_CGROUP}\ntree._send = print\nwarden.SWEEP_S = 0.3")
    ward.until("ready").process.terminate()
    assert ward.process.wait() == 71
    # Not to its end: what is left holds it open.
    listen(ward, f"LEFT BEHIND: process {ward.kin['session'].pid} (python) in state S (sleeping) survived SIGKILL")


@pytest.mark.parametrize("how", ["full", "unread", "closed"])
def test_words_that_cannot_be_written_never_matter(begin: Any, how: str) -> None:
    reading, writing = os.pipe()
    try:
        if how == "unread":
            os.write(writing, b"x" * fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ))
        with open("/dev/full", "wb") as full:
            ward = begin("killed", stderr=full if how == "full" else writing)
        if how == "closed":
            os.close(reading)
        assert ward.end() == 70
    finally:
        os.close(writing)
        if how != "closed":
            os.close(reading)


def in_terminal(begin: Any, *arguments: str, ignore_hang_up: bool = False, changes: str = "") -> tuple[Ward, int]:
    """A warden with a terminal of its own, and the terminal's other end."""
    master, slave = pty.openpty()

    def prepare() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        if ignore_hang_up:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        as_up_does()

    ward = begin(*arguments, prepare=prepare, stdin=slave, changes=changes)
    os.close(slave)
    return ward, master


def listen(ward: Ward, text: str) -> None:
    """Until the warden says it."""
    assert ward.process.stderr is not None
    assert any(text in line.decode() for line in iter(ward.process.stderr.readline, b""))


def test_ctrl_c_reaches_the_supervisor_once(begin: Any) -> None:
    ward, master = in_terminal(begin, "plain", "until SIGUSR1")
    ward.until("ready")
    os.write(master, b"\x03")
    ward.until("got SIGINT").process.send_signal(signal.SIGUSR1)
    assert ward.end() == 0
    assert [line for line in ward.said if line.startswith("got")] == ["got SIGINT", "got SIGUSR1"]
    os.close(master)


def test_a_closed_terminal_is_one_request_to_stop(begin: Any) -> None:
    ward, master = in_terminal(begin, "session", "until SIGUSR1")
    ward.until("ready")
    os.close(master)
    listen(ward, "terminal was closed: told the supervisor to stop")
    # The shell's, after the kernel's.
    ward.process.send_signal(signal.SIGHUP)
    ward.process.send_signal(signal.SIGUSR1)
    assert (ward.end(), ward.living()) == (0, set())
    assert [line for line in ward.said if line.startswith("got")] == ["got SIGTERM", "got SIGUSR1"]


CLOSED_WHILE_IT_BEGINS = """
import signal
def create(run_id):
    print("begins", flush=True)
    while signal.SIGHUP not in signal.sigpending():
        os.sched_yield()
warden.cgroup.create = create
"""


def test_a_terminal_closed_while_the_run_begins_is_a_request_to_stop(begin: Any) -> None:
    ward, master = in_terminal(begin, "", "until SIGTERM", changes=CLOSED_WHILE_IT_BEGINS)
    ward.until("begins")
    os.close(master)
    assert ward.process.stderr is not None
    assert b"terminal was closed: told the supervisor to stop" in ward.process.stderr.readline()
    assert (ward.end(), ward.said[-1]) == (0, "got SIGTERM")


def test_a_run_that_cannot_be_divided_leaves_no_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refused)
    place = tmp_path / "cgroup"
    place.mkdir()
    with pytest.raises(BlockingIOError):
        warden.fork(warden.Run(os.getpid(), "0", place, False))
    assert not place.exists()


def test_under_nohup_a_closed_terminal_is_nothing(begin: Any) -> None:
    ward, master = in_terminal(begin, "", "until SIGTERM", ignore_hang_up=True)
    ward.until("ready")
    os.close(master)
    listen(ward, "the terminal was closed; going on")
    ward.process.terminate()
    assert ward.end() == 0
    assert [line for line in ward.said if line.startswith("got")] == ["got SIGTERM"]


def test_a_hang_up_while_the_terminal_is_there_means_reload(begin: Any) -> None:
    ward, master = in_terminal(begin, "", "until SIGTERM")
    ward.until("ready").process.send_signal(signal.SIGHUP)
    ward.until("got SIGHUP").process.terminate()
    assert ward.end() == 0
    os.close(master)


def test_as_pid_1_it_reaps_orphans_takes_signals_and_takes_all_along(begin: Any) -> None:
    prefix = ("unshare", "-pf", "--mount-proc")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user cannot make a PID namespace")
    # The pids said are of inside: whether all are gone is seen by the run's environment.
    ward = begin("plain,session", "zombies", prefix=prefix, changes=WITHOUT_CGROUP)
    assert ward.end() == 0, ward.said
    assert "supervisor 2" in ward.said
    # TERM came from inside: a PID 1 without a handler would not have had it.
    assert ward.said[-2:] == ["zombies 0", "got SIGTERM"]
    assert tree.find_run(ward.run_id) == ()


def test_it_imports_only_the_standard_library() -> None:
    code = f"import sys; sys.path.append({str(ROOT)!r}); import stagelaunch.warden; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    top = {name.partition(".")[0] for name in ran.stdout.split()}
    assert top - set(sys.stdlib_module_names) == {"stagelaunch", "__main__"} & top | {"stagelaunch"}


def test_what_is_started_later_carries_the_run(begin: Any) -> None:
    ward = begin("exec").until("ready")
    assert tree.is_marked(ward.kin["exec"], ward.run_id)
    assert not tree.is_marked(ward.kin["exec"], ward.run_id, "stage")


# From here on with the real command.


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """One stage that has left a grandchild of nobody, in a session of its own, and boots on until it is let."""
    os.mkfifo(tmp_path / "hold")
    options = {"fault": "import:double", "hold": str(tmp_path / "hold")}
    made = Site(tmp_path, [light_stage(0, "alpha", 0, options=options)])
    yield made
    # A test that fails half-way leaves what it was about.
    state = made.state()
    tree.sweep(lambda table: tree.find_run(state.get("run_id", ""), table), 10)


def booting(site: Site) -> tuple[subprocess.Popen[str], dict[str, int], int]:
    """The command, a pidfd of each of its processes, and the orphan's pid, once the stage is in its load phase."""
    up = site.start("up", str(site.write()), "--quiet")
    assert up.stderr is not None
    lines = []
    for line in up.stderr:
        lines.append(line)
        if "context -> load" in line:
            break
    log = (site.directory / "run" / "site" / "logs" / "alpha.log").read_text()
    (stage,), (orphan,) = Ran(0, "", "".join(lines)).pids, Ran(0, "", log).pids
    assert site.state()["warden"]["pid"] == up.pid
    found = {"supervisor": site.state()["pid"], "stage": stage, "orphan": orphan}
    return up, {name: os.pidfd_open(pid) for name, pid in found.items()}, orphan


def test_a_supervisor_killed_while_it_boots_leaves_nothing(site: Site) -> None:
    up, pidfds, _ = booting(site)
    signal.pidfd_send_signal(pidfds["supervisor"], signal.SIGKILL)
    _, said = up.communicate(timeout=60)
    assert up.returncode == 70, said
    assert "was killed by SIGKILL; clearing up" in said
    # At the instant the command is over.
    assert select.select(list(pidfds.values()), [], [], 0)[0] == list(pidfds.values())
    assert "died without cleaning up" in site.run("status", str(site.config)).stdout
    report = site.run("report", str(site.config))
    assert (report.code, "its supervisor is gone" in report.stderr) == (0, True), report.stderr
    assert "site: booting, not booted, as of" in report.stdout
    for info in site.devices().values():
        assert (info.free_bytes, info.processes) == (info.total_bytes, ())
    for fd in pidfds.values():
        os.close(fd)


def test_a_killed_warden_takes_all_along_by_its_supervisor(site: Site) -> None:
    up, pidfds, _ = booting(site)
    up.kill()
    assert tree.wait_for_ends(pidfds.values(), time.monotonic() + 10)
    up.communicate(timeout=60)
    for info in site.devices().values():
        assert (info.free_bytes, info.processes) == (info.total_bytes, ())
    for fd in pidfds.values():
        os.close(fd)


def test_what_is_left_when_the_warden_is_killed_too_is_killed_by_the_next_start(site: Site) -> None:
    up, pidfds, left = booting(site)
    signal.pidfd_send_signal(pidfds["supervisor"], signal.SIGKILL)
    up.kill()
    assert tree.wait_for_ends([pidfds["supervisor"], pidfds["stage"]], time.monotonic() + 10)
    assert f"still there: process {left} (alpha) in state S" in site.run("status", str(site.config)).stdout
    doctor = site.run("doctor", "--config", str(site.config)).stdout
    assert f"process {left} (alpha) in state S" in doctor.partition("still there: ")[2]
    # It will never fit: refused, but not before the ground is clear.
    site.stages[0] |= {"utilization": 1.0, "options": {}}
    again = site.up()
    assert (again.code, f"left by an earlier run (pid {left}, alpha): killed" in again.stderr) == (78, True)
    assert tree.wait_for_ends(pidfds.values(), time.monotonic())
    # Its resource tracker, which holds the same pipes, ended by itself with the last of them.
    up.communicate(timeout=60)
    for fd in pidfds.values():
        os.close(fd)
