"""Logs of stages: written by the stage alone whatever happens around it, put aside without a loss, shown as they grow.

The worker's side runs in a child without an engine: its output and its control thread, as ``worker.main`` makes them.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from deployments import ROOT, TIMEOUT_S, Site, light_stage

from stagelaunch.cli.background import start_in_background
from stagelaunch.cli.foreground import Voice
from stagelaunch.core import messages as m
from stagelaunch.core.config import Logs
from stagelaunch.core.errors import ConfigError
from stagelaunch.core.phases import Phase
from stagelaunch.supervisor import logs as stage_logs
from stagelaunch.supervisor.logs import StageLogs, follow_logs, put_aside
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.system.log_file import Follower, tail
from stagelaunch.system.process import boot_id, start_time
from stagelaunch.worker.reporter import Reporter

WORKER = """
import os, select, socket, sys
from pathlib import Path
from stagelaunch.core import messages as m
from stagelaunch.worker.control import Control
from stagelaunch.worker.output import Output
from stagelaunch.worker.reporter import Reporter
channel = socket.socket(fileno=int(sys.argv[2]))
reporter = Reporter(channel)
output = Output(Path(sys.argv[1]), reporter.log_lost)
output.redirect()
control = Control(channel, reporter, output)
control.start()
def heard(): return sys.stdin.readline()
"""
SERVE = """
for message in control.requests():
    if isinstance(message, m.Probe):
        heard()
    elif isinstance(message, m.Stop):
        break
"""


class Worker:
    """The child, and the supervisor's end of its channel."""

    def __init__(self, log: Path, body: str, *wrapper: str) -> None:
        ours, theirs = socket.socketpair()
        command = [*wrapper, sys.executable, "-c", WORKER + body, str(log), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(),))
        self.channel = ours
        self.lines = ours.makefile("rb")

    def send(self, *messages: m.Message) -> None:
        for message in messages:
            self.channel.sendall(m.encode(message))

    def next(self) -> m.Message:
        return m.decode(self.lines.readline())

    def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def synchronise(self) -> None:
        """What was sent before has been done: the thread takes one message after the other."""
        self.send(m.Ping(0))
        assert self.next() == m.Pong(0)


@contextmanager
def worker(log: Path, body: str, *wrapper: str) -> Iterator[Worker]:
    child = Worker(log, body, *wrapper)
    try:
        yield child
    finally:
        child.process.kill()
        child.process.communicate()
        child.lines.close()
        child.channel.close()


# The control thread


def test_the_thread_answers_pings_until_the_stage_serves_and_then_only_its_main_loop_does(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with worker(log, "heard()\nreporter.ready()" + SERVE) as child:
        child.send(m.Ping(1))
        assert child.next() == m.Pong(1)
        child.say()
        assert isinstance(child.next(), m.Ready)
        child.send(m.Ping(2))
        assert child.next() == m.Pong(2)

        # The main loop hangs in a probe; the thread hears on, as the new log shows, but does not answer for it.
        log.rename(tmp_path / "old")
        child.send(m.Probe(1), m.Ping(3), m.ReopenLog())
        while not log.exists():
            assert child.process.poll() is None
        child.channel.setblocking(False)
        with pytest.raises(BlockingIOError):
            child.channel.recv(1, socket.MSG_PEEK)
        child.channel.setblocking(True)
        child.say()
        assert child.next() == m.Pong(3)
        child.send(m.Stop())
        assert child.process.wait(TIMEOUT_S) == 0


def test_a_supervisor_that_is_gone_ends_the_main_loop_and_what_is_no_message_does_not(tmp_path: Path) -> None:
    with worker(tmp_path / "a.log", SERVE) as child:
        child.channel.sendall(b'{"kind":"Tomorrow"}\nnonsense\n')
        child.synchronise()
        child.channel.shutdown(socket.SHUT_RDWR)
        assert child.process.wait(TIMEOUT_S) == 0


def test_two_threads_that_report_do_not_end_up_in_each_others_lines() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # Each longer than what the socket takes in one go.
        reporter, text = Reporter(theirs), "x" * 500_000
        said = [m.Failed(Phase.LOAD, name, text, "", 1, 0.0) for name in ("A", "B")]
        threads = [threading.Thread(target=lambda one=one: [reporter.send(one) for _ in range(5)]) for one in said]
        for thread in threads:
            thread.start()
        with ours.makefile("rb") as lines:
            heard = [m.decode(lines.readline()) for _ in range(10)]
        for thread in threads:
            thread.join()
        assert [heard.count(one) for one in said] == [5, 5]


def test_every_stack_is_written_to_the_log_and_the_stage_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with worker(log, "def boots(): heard()\nboots()") as child:
        # Again until its main thread has come where it waits.
        stacks = ""
        while "in boots" not in stacks:
            child.send(m.DumpStacks())
            assert child.next() == m.StacksDumped()
            stacks = log.read_text()
        assert "in _listen" in stacks
        child.synchronise()


# A disk that takes nothing


TALKS = """
for number in range(3000):
    print(number, "x" * 100)
sys.stderr.write("y" * 300_000)
sys.stdout.flush()
reporter.ready()
heard()
"""


def in_own_mount(directory: Path, options: str) -> tuple[str, ...]:
    """A command prefix: with a tmpfs at ``directory`` that nobody else sees. Skips where that may not be."""
    mount = f'mount -t tmpfs -o {options} tmpfs "{directory}" && exec "$@"'
    wrapper = ("unshare", "-m", "sh", "-c", mount, "sh")
    try:
        tried = subprocess.run([*wrapper, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if tried.returncode:
        pytest.skip("mounting is not permitted here")
    return wrapper


def test_a_full_disk_costs_the_words_and_not_the_stage(tmp_path: Path) -> None:
    with worker(tmp_path / "disk" / "a.log", TALKS, *in_own_mount(made(tmp_path / "disk"), "size=64k")) as child:
        assert isinstance(child.next(), m.Ready)
        child.synchronise()
        # Looked at through the child: nobody else sees its disk.
        log = Path(f"/proc/{child.process.pid}/root{tmp_path}/disk/a.log")
        assert 0 < log.stat().st_size <= 64 << 10
        assert log.read_text().startswith("0 xxx")


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_a_file_size_limit_costs_the_words_and_not_the_stage(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    with worker(tmp_path / "a.log", limit + TALKS) as child:
        assert isinstance(child.next(), m.Ready)
        assert (tmp_path / "a.log").stat().st_size == 4096


def test_a_read_only_disk_is_said_once_and_the_stage_goes_on(tmp_path: Path) -> None:
    with worker(tmp_path / "disk" / "a.log", TALKS, *in_own_mount(made(tmp_path / "disk"), "ro")) as child:
        lost = child.next()
        assert isinstance(lost, m.LogLost)
        assert "cannot open its log" in lost.text
        assert "Read-only file system" in lost.text
        assert isinstance(child.next(), m.Ready)
        child.send(m.ReopenLog())
        child.synchronise()


def test_a_log_that_cannot_be_opened_anew_goes_on_in_the_old_file(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with worker(log, 'heard()\nprint("still here")\nreporter.ready()') as child:
        child.synchronise()
        log.rename(tmp_path / "old")
        log.mkdir()
        child.send(m.ReopenLog(), m.ReopenLog())
        assert "goes to the old file" in str(child.next())
        child.say()
        assert isinstance(child.next(), m.Ready)
        assert (tmp_path / "old").read_text() == "still here\n"


def test_a_log_that_became_a_fifo_blocks_neither_its_stage_nor_who_reads_it(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with worker(log, 'heard()\nprint("still here")\nreporter.ready()') as child:
        child.synchronise()
        follower = Follower(log)
        log.rename(tmp_path / "old")
        os.mkfifo(log)
        child.send(m.ReopenLog())
        assert "goes to the old file" in str(child.next())
        assert (follower.poll(), tail(log, 3)) == ([], ())
        child.say()
        assert isinstance(child.next(), m.Ready)
        assert follower.finish() == [b"still here"]


def test_what_a_library_puts_in_place_of_its_output_and_an_error_without_words_are_no_trouble(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    body = """
class WriteOnly:
    write = lambda self, text: None
class Mute(Exception):
    __str__ = lambda self: 1 / 0
sys.stdout, sys.stderr = None, WriteOnly()
output.redirect()
print("heard of")
try: raise Mute
except Mute as error: reporter.failed(error)
sys.stdout, sys.stderr = WriteOnly(), None
reporter.failed(Mute())
import stagelaunch.worker.main
stagelaunch.worker.main._leave(0)
"""
    with worker(log, body) as child:
        for _ in range(2):
            failed = child.next()
            assert isinstance(failed, m.Failed)
            assert failed.text == "Mute, and what it says cannot be had: it raises ZeroDivisionError"
        assert child.process.wait(TIMEOUT_S) == 0
    assert log.read_text().startswith("heard of\nTraceback")


def test_a_state_that_is_a_fifo_or_a_hole_is_no_state(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    os.mkfifo(runtime.state)
    assert (runtime.read_state(), runtime.live_pid()) == ({}, None)
    runtime.state.unlink()
    runtime.state.touch()
    os.truncate(runtime.state, 1 << 40)
    assert runtime.read_state() == {}


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    runtime.weight_plan("a").parent.mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, os.getpid()):
        for path in (runtime.timeline, runtime.weight_plan("a")):
            path.with_name(f".{path.name}.{pid}").touch()
    runtime.timeline.touch()
    runtime.clear_drafts()
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == [f".a.json.{os.getpid()}", f".timeline.json.{os.getpid()}", "timeline.json"]


# Rotation


def test_nothing_is_lost_and_nothing_comes_twice_through_rotations(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    body = """
number = 0
while not select.select([0], [], [], 0)[0]:
    print(number)
    number += 1
print("end")
"""
    with worker(log, body) as child:
        child.synchronise()
        follower, found = Follower(log, lines=10**9), list[bytes]()
        for _ in range(20):
            put_aside(log, 100)
            child.send(m.ReopenLog())
            child.synchronise()
            found += follower.poll()
        child.say()
        assert child.process.wait(TIMEOUT_S) == 0
        found += follower.finish()
    files = [log, *(tmp_path / f"a.log.{number}" for number in range(1, 21))]
    written = b"".join(file.read_bytes() for file in reversed(files)).splitlines()
    assert written == [b"%d" % number for number in range(len(written) - 1)] + [b"end"]
    assert found == written


def test_a_log_that_has_grown_too_large_is_put_aside_and_its_stage_told(tmp_path: Path) -> None:
    told: list[tuple[int, m.Message]] = []
    said: list[str] = []
    paths = {0: ("alpha", tmp_path / "alpha.log"), 1: ("beta", tmp_path / "beta.log")}
    minder = StageLogs(paths, Logs(max_size=10, keep=1), lambda *words: told.append(words), said.append)
    # One that is not there, or was deleted, is made.
    paths[1][1].touch()
    minder.rotate()
    assert told == [(0, m.ReopenLog())]
    told.clear()
    paths[0][1].write_text("x" * 10)
    minder.rotate()
    assert told == []
    paths[0][1].write_text("x" * 11)
    minder.rotate()
    assert told == [(0, m.ReopenLog())]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alpha.log.1", "beta.log"]

    # What cannot be put aside is said once.
    (tmp_path / "beta.log.1").mkdir()
    paths[1][1].write_text("x" * 11)
    minder.rotate()
    minder.rotate()
    assert (len(said), "beta: cannot put aside its log" in said[0]) == (1, True)

    told.clear()
    minder.reopen()
    assert [stage for stage, _ in told] == [0, 1]


# The console


def test_the_console_shows_new_lines_with_their_stage_and_the_rest_at_the_end(tmp_path: Path) -> None:
    alpha, gamma = tmp_path / "alpha.log", tmp_path / "gamma.log"
    alpha.write_text("of an earlier run\n")
    printed: list[str] = []
    takes_lines = True

    def show(line: str) -> bool:
        if takes_lines:
            printed.append(line)
        return takes_lines

    async def scenario() -> None:
        nonlocal takes_lines
        paths = {0: ("alpha", alpha), 1: ("gamma-2", gamma)}
        console = StageLogs(paths, Logs(), lambda *_: None, lambda _: None, show)
        with alpha.open("a") as file:
            file.write("one\nha")
        gamma.write_text("\x1b[31mred\n")
        console.poll()
        assert printed == ["alpha   | one", "gamma-2 | \\x1b[31mred"]
        takes_lines = False
        with alpha.open("a") as file:
            file.write("lf\ntwo\nwithout end")
        console.poll()
        put_aside(alpha, 1)
        alpha.write_text(", in a new file\nthree")
        console.poll()
        takes_lines = True
        await console.close()
        assert printed[2:] == [
            "alpha   | half", "alpha   | two", "alpha   | without end, in a new file", "alpha   | three"
        ]  # fmt: skip

    asyncio.run(scenario())


def test_each_process_of_a_stage_begins_with_a_heading_that_the_console_leaves_out(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "alpha.log"
    printed: list[str] = []

    async def scenario() -> None:
        console = StageLogs(
            {0: ("alpha", log)}, Logs(), lambda *_: None, lambda _: None, lambda line: not printed.append(line)
        )
        console.begin(0)
        with log.open("a") as file:
            file.write("killed half-w")
        console.begin(0)
        console.poll()
        await console.close()

    asyncio.run(scenario())
    heading, line, again = log.read_text().splitlines()
    assert re.fullmatch(r"---- \d{4}-\d\d-\d\dT[0-9:]{8}[+-]\d{4} alpha started by supervisor pid \d+ ----", heading)
    assert (line, again[:4]) == ("killed half-w", "----")
    assert printed == ["alpha | killed half-w"]


def test_a_stage_whose_log_cannot_be_written_begins_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    StageLogs({0: ("alpha", tmp_path / "logs" / "alpha.log")}, Logs(), lambda *_: None, lambda _: None).begin(0)


def test_a_console_that_takes_nothing_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_logs, "LAST_LINES_WAIT_S", 0.05)
    log = tmp_path / "alpha.log"

    async def scenario() -> None:
        console = StageLogs({0: ("alpha", log)}, Logs(), lambda *_: None, lambda _: None, lambda _: False)
        console.start()
        log.write_text("line\n")
        await asyncio.wait_for(console.close(), 30)

    asyncio.run(scenario())


def test_a_pipe_that_nobody_reads_takes_no_line_and_blocks_nobody(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom stagelaunch.cli.foreground import Voice as _Voice\n"
        "voice = _Voice(None, None, '', shows_stages=True)\n"
        "shown = 0\nwhile voice.listener().show('x' * 999): shown += 1\n"
        "os.write(1, b'%d' % shown)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    with ExitStack() as stack:
        stack.callback(child.kill)
        assert child.wait(TIMEOUT_S) == 0
        stdout, stderr = child.communicate()
    assert (stderr.count(b"\n"), stderr.count(b"\n") > 10) == (int(stdout), True)


# What commands show


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Runtime, subprocess.Popen[bytes]]]:
    """A runtime whose supervisor is a process that does nothing until its stdin is closed."""
    runtime = Runtime.of("omni", tmp_path)
    runtime.create()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner, ExitStack() as stack:
        stack.callback(owner.kill)
        body = f'{{"state": "ready", "pid": {owner.pid}, "start": {start_time(owner.pid)}, "boot": "{boot_id()}"}}'
        runtime.state.write_text(body)
        yield runtime, owner


def logs_command(runtime: Runtime, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stagelaunch", "logs", "--runtime-dir", str(runtime.directory.parent), *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_logs_follows_through_a_rotation_until_the_deployment_ends(
    running: tuple[Runtime, subprocess.Popen[bytes]],
) -> None:
    runtime, owner = running
    log = runtime.log("talker")
    log.write_text("1\n2\n3\n")
    following = logs_command(runtime, "-f", "-n", "2", "talker")
    assert following.stdout is not None
    assert [following.stdout.readline() for _ in range(2)] == ["2\n", "3\n"]
    put_aside(log, 1)
    with runtime.log("talker").with_name("talker.log.1").open("a") as old:
        old.write("4\n")
    log.write_text("5\n")
    assert [following.stdout.readline() for _ in range(2)] == ["4\n", "5\n"]
    owner.communicate(b"\n")
    stdout, stderr = following.communicate(timeout=TIMEOUT_S)
    assert (following.returncode, stdout, stderr) == (0, "", "")

    # Of a deployment that does not run: the files, and -f is over at once.
    runtime.log("thinker").write_text("a\nb\n")
    stdout, _ = logs_command(runtime, "omni", "-f", "-n", "3").communicate(timeout=TIMEOUT_S)
    assert stdout.splitlines() == ["talker  | 3", "talker  | 4", "talker  | 5", "thinker | a", "thinker | b"]


def test_ctrl_c_ends_logs(running: tuple[Runtime, subprocess.Popen[bytes]]) -> None:
    runtime, _ = running
    runtime.log("talker").write_text("1\n")
    following = logs_command(runtime, "-f", "omni")
    assert following.stdout is not None
    assert following.stdout.readline() == "1\n"
    following.send_signal(signal.SIGINT)
    _, stderr = following.communicate(timeout=TIMEOUT_S)
    assert (following.returncode, "Traceback" in stderr) == (130, False)


def test_followers_of_the_supervisor_end_with_it(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("1\n2\n")

    async def scenario() -> None:
        ended, heard = asyncio.Event(), list[str]()

        async def follow() -> None:
            async for record in follow_logs({"a": log}, 1, ended):
                heard.append(record["line"])
                if record["line"] == "2":
                    with log.open("a") as file:
                        file.write("3\n")
                    ended.set()

        await asyncio.wait_for(follow(), 30)
        assert heard == ["2", "3"]
        assert [record async for record in follow_logs({"a": log}, 2, None)] == [
            {"stage": "a", "line": "2"}, {"stage": "a", "line": "3"}
        ]  # fmt: skip

    asyncio.run(scenario())


def test_the_log_of_a_detached_supervisor_says_where_each_start_begins(tmp_path: Path) -> None:
    # Larger than its device: it ends before anything is started.
    site = Site(tmp_path, [light_stage(0, "alpha", 0, utilization=1.0)])
    for _ in range(2):
        assert site.up("--detach", "--wait").code == 78
    said = (tmp_path / "run" / "site" / "supervisor.log").read_text().splitlines()
    starts = [line for line in said if line.startswith("---- ")]
    assert len(starts) == 2
    assert all("supervisor pid" in line and line.endswith(f"config {site.config} ----") for line in starts)


def test_lines_in_a_log_have_the_time_of_day_and_those_of_a_terminal_have_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Voice(None, tmp_path / "supervisor.log", "x.yaml", shows_stages=False).listener().say("alpha: started")
    Voice(None, None, "x.yaml", shows_stages=True).listener().say("alpha: started")
    logged, shown = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[0-9:]{8}[+-]\d{4} \[ *0\.00s\] alpha: started", logged)
    assert re.fullmatch(r"\[ *0\.00s\] alpha: started", shown)


def test_a_log_of_a_detached_supervisor_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    for make in (Path.mkdir, os.mkfifo):
        make(runtime.supervisor_log)
        with pytest.raises(ConfigError, match=r"supervisor\.log: cannot be written: "):
            start_in_background(runtime, "any.yaml", None)
        runtime.supervisor_log.rename(tmp_path / make.__name__)


def test_output_to_a_log_is_opened_anew_by_its_name(tmp_path: Path) -> None:
    log = tmp_path / "supervisor.log"
    script = (
        "import sys; from pathlib import Path; from stagelaunch.cli.streams import *; log = Path(sys.argv[1])\n"
        "print(is_file(2, log)); log.rename(log.with_name('old')); print(is_file(2, log)); reopen_output(log)\n"
        "print('new'); print('too', file=sys.stderr)"
    )
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", script, str(log)], cwd=ROOT, stdout=file, stderr=file, check=True)
    assert (tmp_path / "old").read_text() == "True\nFalse\n"
    assert sorted(log.read_text().split()) == ["new", "too"]
