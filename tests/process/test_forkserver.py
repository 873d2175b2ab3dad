"""Stages are forked from a process that has imported their libraries; whatever happens to it, none outlives it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployments import HERE, Site, is_gone, light_stage
from test_restarts import Up

from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.run_spec import StageRun
from stagelaunch.devices.simfile import SimulatedFile
from stagelaunch.supervisor import forkserver_process, stage_process
from stagelaunch.supervisor.forkserver import Forked, Forkservers
from stagelaunch.supervisor.forkserver_process import ForkserverProcess
from stagelaunch.supervisor.stage_process import Listener, StageProcess
from stagelaunch.system import tree
from stagelaunch.worker.forkserver import LIBRARY_THREADS

WAIT_S = 30.0


def stage_run(stage_id: int, engine: str = "wave:Wave_read", **env: str) -> StageRun:
    """By default of an "engine" that is in the standard library and nobody has imported."""
    return StageRun(
        "site", stage_id, f"stage{stage_id}", "simulated", 0, "SIM-0", None, Path("/locks"), 1.0, engine,
        EngineSpec("any", Path("/c"), "auto", 1, 2, 3, 4, (1,), {}), 0.5, None, env, Path("/log"), "claim",
    )  # fmt: skip


class Child:
    """One forked stage that tells what it is."""

    def __init__(self) -> None:
        self.channel, self.theirs = socket.socketpair()
        self.started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.forked = Forked(self.theirs, self.started.set_result, self.ended.set_result, self.failed.set_result)

    async def tells(self) -> dict[str, Any]:
        self.channel.setblocking(False)
        body: dict[str, Any] = json.loads(await asyncio.get_running_loop().sock_recv(self.channel, 1 << 16))
        return body


class Nursery:
    """Forkservers whose stages are ``telling_worker``s."""

    def __init__(self, runs: list[StageRun], directory: Path, *, preload: bool = True) -> None:
        self.runs = runs
        self.said: list[str] = []
        self.forkservers = Forkservers(runs, directory / "imports.log", self.said.append, preload=preload)
        self.children: list[Child] = []

    def start(self, stage_id: int) -> Child:
        child = Child()
        self.children.append(child)
        run = next(run for run in self.runs if run.stage_id == stage_id)
        self.forkservers.start(run, Path("/run.json"), child.forked)
        return child

    async def __aenter__(self) -> Nursery:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.forkservers.close()
        for child in self.children:
            child.forked.close_channel()
            child.channel.close()


@pytest.fixture(autouse=True)
def telling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "trivial"), str(HERE)]))
    monkeypatch.setenv("STAGELAUNCH_TEST_WORKER", "telling_worker.py")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def play(scenario: Callable[[], Any]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(WAIT_S):
            await scenario()

    asyncio.run(in_time())


def test_a_stage_gets_what_was_imported_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Nursery(
            [stage_run(0, X="1"), stage_run(1, X="1", CUDA_VISIBLE_DEVICES="GPU-7")], tmp_path
        ) as nursery:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGQUIT})
            first, second = nursery.start(0), nursery.start(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            told = await first.tells()
            assert told["blocked"] == []
            assert told["pid"] == told["session"] == await first.started
            assert (told["run_file"], told["stage_id"], told["name"]) == ("/run.json", 0, "stage0")
            assert told["wave_is_imported"]
            assert told["frozen"] > 0
            assert told["descriptors"] == sorted([0, 1, 2, told["channel"]])
            assert told["environment"]["X"] == "1"
            assert not told["environment"].keys() & LIBRARY_THREADS.keys()
            # What is read when a device is opened may differ.
            assert (await second.tells())["parent"] == told["parent"]

    play(scenario)


def test_what_a_library_may_read_while_it_is_imported_is_not_shared(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Nursery([stage_run(0, OMP_NUM_THREADS="1"), stage_run(1, OMP_NUM_THREADS="2")], tmp_path) as nursery:
            children = [nursery.start(0), nursery.start(1)]
            told = [await child.tells() for child in children]
            assert [body["environment"]["OMP_NUM_THREADS"] for body in told] == ["1", "2"]
            assert told[0]["parent"] != told[1]["parent"]

    play(scenario)


def test_without_preload_nothing_is_imported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Nursery([stage_run(0)], tmp_path, preload=False) as nursery:
            assert not (await nursery.start(0).tells())["wave_is_imported"]

    play(scenario)


@pytest.mark.parametrize(("order", "code"), [(b"exit 0", 0), (b"exit 7", 7), (b"kill 9", -9), (b"kill 6", -6)])
def test_an_end_is_told_and_its_number_kept_until_it_is_reaped(tmp_path: Path, order: bytes, code: int) -> None:
    async def scenario() -> None:
        async with Nursery([stage_run(0)], tmp_path) as nursery:
            child = nursery.start(0)
            await child.tells()
            child.channel.send(order)
            assert await child.ended == code
            pid = child.started.result()
            process = tree.read_process(pid)
            assert process is not None
            assert process.state == "Z"
            assert child.forked.is_unreaped
            child.forked.reap()
            assert not child.forked.is_unreaped
            # Requests are taken in turn: when the next stage runs, this one is reaped.
            await nursery.start(0).tells()
            assert tree.read_process(pid) is None

    play(scenario)


def test_its_death_is_the_death_of_its_stages_and_the_next_start_gets_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Nursery([stage_run(0)], tmp_path) as nursery:
            child = nursery.start(0)
            parent = (await child.tells())["parent"]
            os.kill(parent, signal.SIGKILL)
            assert is_gone(child.started.result())
            # Asked for before the death was noticed.
            assert (await nursery.start(0).tells())["parent"] != parent
            assert child.forked.is_orphaned
            assert any(f"forked from (pid {parent}) was killed by SIGKILL" in line for line in nursery.said)

    play(scenario)


def test_the_death_of_the_supervisor_is_its_death_and_its_stages(tmp_path: Path, spawn: Any) -> None:
    child = spawn(SUPERVISOR, str(tmp_path))
    pids = json.loads(child.stdout.readline())
    pidfds = [os.pidfd_open(pid) for pid in pids]
    child.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], WAIT_S)[0]
        os.close(pidfd)


SUPERVISOR = """
import asyncio, json, sys
from pathlib import Path
from test_forkserver import Nursery, stage_run
async def main():
    nursery = Nursery([stage_run(0)], Path(sys.argv[1]))
    told = await nursery.start(0).tells()
    print(json.dumps([told["parent"], told["pid"]]), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_stage_that_is_killed_before_it_runs_never_does(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    async def scenario() -> None:
        waits = stage_run(0, "odd_wait:Engine", ODD_WAIT=str(tmp_path / "fifo"))
        async with Nursery([waits], tmp_path) as nursery:
            exits: list[int | None] = []
            listener = Listener(lambda _: None, lambda: None, exits.append, lambda _: None)
            unwanted = StageProcess(nursery.forkservers, waits, Path("/run.json"), listener)
            wanted = nursery.start(0)
            # Opened, it is being imported.
            fifo = await asyncio.to_thread(os.open, tmp_path / "fifo", os.O_WRONLY)
            unwanted.kill()
            await unwanted.ended.wait()
            os.close(fifo)
            parent = (await wanted.tells())["parent"]
            while len(tree.children(parent)) > 1:  # noqa: ASYNC110  # another process's children: nobody tells
                await asyncio.sleep(0)
            assert (exits, unwanted.pid) == ([None], None)

    play(scenario)


def test_a_child_that_floods_the_channel_of_a_dead_stage_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELAUNCH_TEST_WORKER", "flooding_worker.py")

    async def scenario() -> None:
        async with Nursery([stage_run(0)], tmp_path) as nursery:
            loop = asyncio.get_running_loop()
            started, exited = loop.create_future(), loop.create_future()
            listener = Listener(lambda _: None, lambda: started.set_result(None), exited.set_result, lambda _: None)
            stage = StageProcess(nursery.forkservers, stage_run(0), Path("/run.json"), listener)
            await started
            assert stage.pid is not None
            family = [stage.pid, *(process.pid for process in tree.members(tree.read_table(), stage.pid))]
            assert await exited == 3
            assert all(is_gone(pid) for pid in family)

    play(scenario)


ASKS_THE_DRIVER = """
import os
import pynvml
from stagelaunch.worker.forkserver import _close_driver
_close_driver()
pynvml.nvmlInit()
pynvml.nvmlInit()
before = len(os.listdir("/proc/self/fd"))
_close_driver()
try:
    pynvml.nvmlDeviceGetCount()
except pynvml.NVMLError_Uninitialized:
    print(before - len(os.listdir("/proc/self/fd")))
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetCount())
"""


def test_a_driver_that_was_asked_during_an_import_is_closed_before_the_fork(
    fake_nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawn: Any
) -> None:
    machine = SimulatedMachine(tmp_path / "devices", {0: 1000, 1: 2000}, 0)
    SimulatedFile.open(machine).close()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml))
    monkeypatch.setenv("FAKE_NVML_FILE", str(machine.path))
    child = spawn(ASKS_THE_DRIVER)
    assert child.stdout.read() == "1\n2\n"


def test_what_is_being_imported_can_be_asked_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    async def scenario() -> None:
        waits = stage_run(0, "odd_wait:Engine", ODD_WAIT=str(tmp_path / "fifo"))
        async with Nursery([waits], tmp_path) as nursery:
            child = nursery.start(0)
            fifo = await asyncio.to_thread(os.open, tmp_path / "fifo", os.O_WRONLY)
            # What it has said before is heard first.
            await asyncio.sleep(0)
            child.forked.dump_imports()
            os.close(fifo)
            await child.tells()

    play(scenario)
    assert "odd_wait.py" in (tmp_path / "imports.log").read_text()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module that does this when it is imported; its engine's name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / "odd_library.py").write_text(f"{text}\nclass Engine: ...\n")
        return "odd_library:Engine"

    return write


@pytest.mark.parametrize(
    "text",
    [
        "import socket; socket.setdefaulttimeout(0.01)",
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "import os; os.environ.pop('OPENBLAS_NUM_THREADS')",
        "print('said', end='')",
        "import sys; sys.stderr = None; sys.stdout.close()",
        "import os; [os.close(fd) for fd in range(3)]",
        "raise ImportError('said' + 300_000 * ' ')",
        "import os; child = os.fork(); child and os.waitpid(child, 0)",
        "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
    ],
)
def test_what_libraries_do_when_they_are_imported_is_no_trouble(
    tmp_path: Path, library: Callable[[str], str], text: str
) -> None:
    async def scenario() -> None:
        async with Nursery([stage_run(0, library(text))], tmp_path) as nursery:
            child = nursery.start(0)
            told = await child.tells()
            child.channel.send(b"exit 3")
            assert await child.ended == 3
            again = await nursery.start(0).tells()
            assert again["parent"] == told["parent"] == nursery.forkservers._all[0]._process.pid
            assert (told["timeout"], told["channel"] > 2) == (None, True)
            assert told["on_child"] == (signal.SIG_IGN if "SIGCHLD" in text else signal.SIG_DFL)
            assert nursery.said == ["importing the libraries of stage0; then they are started"]

    play(scenario)
    assert (tmp_path / "imports.log").read_text().count("said") == text.count("said")


def test_what_one_engine_changes_of_the_process_does_not_reach_the_others(
    tmp_path: Path, library: Callable[[str], str]
) -> None:
    name = library("import os; os.chdir('/'); os.umask(0o27)")

    async def scenario() -> None:
        async with Nursery([stage_run(0, name), stage_run(1)], tmp_path) as nursery:
            other = nursery.start(1)
            told = await other.tells()
            assert os.readlink(f"/proc/{told['pid']}/cwd") == os.getcwd()
            assert "changes the working directory and the umask; each imports its" in nursery.said[-1]
        # Alone it may.
        async with Nursery([stage_run(0, name)], tmp_path) as nursery:
            told = await nursery.start(0).tells()
            assert os.readlink(f"/proc/{told['pid']}/cwd") == "/"

    play(scenario)


def test_the_end_of_what_imports_waits_for_nothing_that_a_library_began(
    tmp_path: Path, library: Callable[[str], str]
) -> None:
    text = "import threading; threading.Thread(target=threading.Event().wait).start(); raise KeyboardInterrupt"

    async def scenario() -> None:
        async with Nursery([stage_run(0, library(text))], tmp_path) as nursery:
            await nursery.start(0).tells()
            assert any("ended with exit code 1; each imports" in line for line in nursery.said)

    play(scenario)
    assert "KeyboardInterrupt" in (tmp_path / "imports.log").read_text()


def test_an_end_that_was_told_too_late_is_one_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_process, "EXIT_CODE_S", 0.0)

    async def scenario() -> None:
        async with Nursery([stage_run(0)], tmp_path) as nursery:
            parent = (await nursery.start(0).tells())["parent"]
            exits, started = [], asyncio.Event()
            listener = Listener(lambda _: None, started.set, exits.append, lambda _: None)
            process = StageProcess(nursery.forkservers, nursery.runs[0], Path("/run.json"), listener)
            await started.wait()
            os.kill(parent, signal.SIGSTOP)
            process.kill()
            await process.ended.wait()
            os.kill(parent, signal.SIGCONT)
            assert (await nursery.start(0).tells())["parent"] == parent
            assert exits == [-9]

    play(scenario)


def test_more_may_be_asked_for_than_it_can_be_told_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Nursery([stage_run(0)], tmp_path) as nursery:
            first = nursery.start(0)
            (server,) = nursery.forkservers._all
            server._process.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            children = [nursery.start(0) for _ in range(20)]
            assert len(server._unsent) > 5
            await first.started
            for child in children:
                await child.started

    play(scenario)


def test_a_stage_that_died_with_its_forkserver_before_it_was_heard_of_is_over(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()

    async def scenario() -> None:
        async with Nursery([stage_run(0)], tmp_path) as nursery:
            exits: list[int | None] = []
            listener = Listener(lambda _: None, lambda: None, exits.append, lambda _: None)
            process = StageProcess(nursery.forkservers, nursery.runs[0], Path("/run.json"), listener)
            process._started(gone.pid)
            assert (exits, process.pid) == ([-9], gone.pid)
            unwanted = StageProcess(nursery.forkservers, nursery.runs[0], Path("/run.json"), listener)
            unwanted.kill()
            unwanted._started(gone.pid)

    play(scenario)


def test_variables_that_are_too_long_to_be_told_leave_no_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Nursery([stage_run(0, X="x" * 300_000)], tmp_path) as nursery:
            before = os.listdir("/proc/self/fd")
            with pytest.raises(OSError, match="the variables of its env are too long"):
                nursery.start(0)
            assert len(os.listdir("/proc/self/fd")) - len(before) == 2, "more than the ends of the stage's own channel"

    children = Path("/proc/thread-self/children").read_text()
    play(scenario)
    assert Path("/proc/thread-self/children").read_text() == children


def test_one_that_cannot_be_killed_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver_process, "KILLED_S", 0.05)
    process = ForkserverProcess()
    monkeypatch.setattr(process, "kill", lambda: None)
    process.kill()
    assert process.wait() is None
    process._process.kill()
    process._process.wait()


def test_what_was_killed_before_it_ran_is_not_asked_of_another(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    async def scenario() -> None:
        waits = stage_run(0, "odd_wait:Engine", ODD_WAIT=str(tmp_path / "fifo"))
        async with Nursery([waits], tmp_path) as nursery:
            listener = Listener(lambda _: None, lambda: None, lambda _: None, lambda _: None)
            unwanted = StageProcess(nursery.forkservers, waits, Path("/run.json"), listener)
            wanted = nursery.start(0)
            unwanted.kill()
            nursery.forkservers._all[0].kill()
            await wanted.started
            (_, second) = nursery.forkservers._all
            assert (len(second._running), second._waiting) == (1, {})

    play(scenario)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.delenv("STAGELAUNCH_TEST_WORKER")
    return Site(tmp_path, [light_stage(0, "alpha", 0), light_stage(1, "beta", 1)])


def test_libraries_that_start_threads_are_imported_by_each_stage(site: Site) -> None:
    site.stages = [light_stage(0, "alpha", 0, engine="odd_threads:LightEngine")]
    up = Up(site)
    up.process.send_signal(signal.SIGINT)
    ran = up.finish()
    assert ran.code == 130
    assert "cannot fork stages from one process: what they import starts threads (1); each imports" in ran.stderr
    site.assert_nothing_left(ran)


def test_libraries_that_end_whoever_imports_them_are_the_failure_of_their_stage(site: Site) -> None:
    site.stages[0]["engine"] = "odd_death:Engine"
    site.top["logs"] = {"max_size": "1KiB", "keep": 1}
    runtime = site.directory / "run" / "site"
    runtime.mkdir(parents=True)
    (runtime / "imports.log").write_text("what earlier boots have said\n" * 100)
    # Blocks nobody either.
    os.mkfifo(runtime / "stacks.log")
    ran = site.up("--quiet")
    assert ran.code == 1
    assert "ended with exit code 7; each imports its libraries itself" in ran.stderr
    first = site.state()["first_failure"]
    assert (first["stage"], first["phase"], first["exit_status"]) == ("alpha", "import", 7)
    assert (runtime / "imports.log").stat().st_size < 1024 < (runtime / "imports.log.1").stat().st_size
    site.assert_nothing_left(ran)


def test_ctrl_c_while_libraries_are_imported_ends_it_at_once(site: Site) -> None:
    fifo = site.directory / "fifo"
    os.mkfifo(fifo)
    site.stages = [light_stage(0, "alpha", 0, engine="odd_wait:Engine", env={"ODD_WAIT": str(fifo)})]
    process = site.start("up", str(site.write()), "--quiet")
    with open(fifo, "wb"):
        began_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "alpha: was not started" in said
    assert time.monotonic() - began_s < 10.0


def test_libraries_that_hang_are_said_to(site: Site) -> None:
    fifo = site.directory / "fifo"
    os.mkfifo(fifo)
    site.stages = [light_stage(0, "alpha", 0, engine="odd_wait:Engine", env={"ODD_WAIT": str(fifo)})]
    site.top["timeouts"] = {"phase": "1s", "stage": "50s", "boot": "70s", "lock": "40s"}
    ran = site.up("--quiet")
    assert ran.code == 1
    log = site.directory / "run" / "site" / "imports.log"
    assert f"its libraries are still being imported; see {log}" in site.state()["first_failure"]["text"]


def test_stages_outlive_a_killed_forkserver_by_a_restart(site: Site) -> None:
    site.top |= {"on_failure": "restart-stage", "restarts": {"max": 2, "backoff": "10ms"}}
    up = Up(site)
    pids = [stage["pid"] for stage in up.stages().values()]
    (parent,) = {int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in pids}
    os.kill(parent, signal.SIGKILL)
    up.wait_for("every stage is ready again")
    again = [stage["pid"] for stage in up.stages().values()]
    assert not set(pids) & set(again)

    # One that is stopped tells no end: it is seen all the same.
    (parent,) = {int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in again}
    os.kill(parent, signal.SIGSTOP)
    up.process.send_signal(signal.SIGINT)
    ran = up.finish()
    assert ran.code == 130
    assert "survived" not in ran.stderr
    site.assert_nothing_left(ran)
