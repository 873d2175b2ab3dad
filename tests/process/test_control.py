"""The control socket: what it answers, to whom, and that it is there; and that a deployment has one supervisor.

Mostly a server in this process with handlers that do nothing; one whole boot at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from deployments import ROOT, TIMEOUT_S, Ran, Site, light_stage

from stagelaunch.cli import status
from stagelaunch.cli.main import main
from stagelaunch.cli.wait import wait_until
from stagelaunch.config_file import load_deployment
from stagelaunch.core import messages as m
from stagelaunch.core.errors import AlreadyRunningError, ConfigError, ControlError
from stagelaunch.core.events import EventKind, News
from stagelaunch.core.units import MIB
from stagelaunch.devices.simfile import SimulatedFile
from stagelaunch.supervisor import control, control_socket
from stagelaunch.supervisor.admission import refuse_if_claimed
from stagelaunch.supervisor.client import exchange, request, stream
from stagelaunch.supervisor.control import ControlServer
from stagelaunch.supervisor.control_service import _imported
from stagelaunch.supervisor.control_socket import ControlSocket, Handlers
from stagelaunch.supervisor.events import EventLog
from stagelaunch.supervisor.keeper import Keeper
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.system.claims import Share, claiming_pid, hold_claims
from stagelaunch.system.locks import LockDirectory
from stagelaunch.system.process import boot_id, start_time


@dataclass
class Stub:
    """A server whose handlers say what a test wants said."""

    runtime: Runtime
    events: EventLog = field(default_factory=EventLog)
    health: dict[str, Any] = field(default_factory=lambda: {"healthy": True, "ready": False, "version": 1})
    restart: Callable[[str], Awaitable[str | None]] | None = None

    def __post_init__(self) -> None:
        self.endpoint = ControlSocket(self.runtime)
        self.server = ControlServer(self.endpoint, self.handlers())

    def handlers(self) -> Handlers:
        async def status() -> dict[str, Any]:
            return {"version": 1, "state": "booting"}

        async def probe(_: int) -> m.Probed:
            raise TimeoutError

        return Handlers(
            status=status,
            down=lambda _: None,
            ready_stages=dict,
            probe=probe,
            health=lambda: self.health,
            events=self.events,
            logs={"alpha": self.runtime.log("alpha")},
            restart=self.restart,
        )


@asynccontextmanager
async def serving(place: Path, **more: Any) -> AsyncIterator[Stub]:
    runtime = Runtime.of("site", place)
    runtime.create()
    stub = Stub(runtime, **more)
    stub.endpoint.bind()
    await stub.server.start()
    try:
        yield stub
    finally:
        stub.events.close()
        await stub.server.close()
        stub.endpoint.close()


async def ask(stub: Stub, method: str, path: str) -> tuple[int, dict[str, Any]]:
    return await asyncio.to_thread(exchange, stub.runtime, method, path)


async def read(stub: Stub, path: str) -> list[dict[str, Any]]:
    return await asyncio.to_thread(lambda: list(stream(stub.runtime, path)))


def test_whoever_comes_before_it_answers_waits_for_it_and_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "WAITING_MAX", 1)

    async def scenario() -> None:
        runtime = Runtime.of("site", tmp_path)
        runtime.create()
        stub = Stub(runtime)
        stub.endpoint.bind()
        with ExitStack() as held:
            for _ in range(2):
                held.enter_context(connect(stub))
            with pytest.raises(ControlError, match=r"did not answer in 0\.01s"):
                await asyncio.to_thread(exchange, runtime, "GET", "/healthz", 0.01)
            answers = [asyncio.create_task(ask(stub, "GET", "/healthz")) for _ in range(3)]
            await asyncio.to_thread(lambda: None)
            await stub.server.start()
            assert [(await answer)[0] for answer in answers] == [200] * 3
        await stub.server.close()
        stub.endpoint.close()

    asyncio.run(scenario())


def test_what_keeps_it_from_answering_is_heard_of() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await _imported("no_such_library")

    with pytest.raises(ModuleNotFoundError):
        asyncio.run(scenario())


def test_health_and_readiness_answer_with_their_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as stub:
            for path in ("/v1/health", "/healthz"):
                assert await ask(stub, "GET", path) == (200, stub.health)
            for path in ("/v1/ready", "/readyz"):
                assert await ask(stub, "GET", path) == (503, stub.health)
            stub.health = {"healthy": False, "ready": True}
            assert [(await ask(stub, "GET", path))[0] for path in ("/healthz", "/readyz")] == [503, 200]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/nowhere", 404, "GET /v1/nowhere: Not Found"),
        ("GET", "/v2/status", 404, "Not Found"),
        ("GET", "/v1/down", 405, "Not Allowed"),
        ("GET", "/v1/logs?stage=beta", 404, "beta: no such stage (there are: alpha)"),
        ("GET", "/v1/logs?lines=many", 400, "lines is 'many'"),
        ("POST", "/v1/probe?stage=beta", 404, "beta: no such stage (there are: alpha)"),
        ("POST", "/v1/restart?stage=alpha", 501, "cannot start a single stage again"),
    ],
)
def test_what_cannot_be_answered_is_json_with_a_version(
    tmp_path: Path, method: str, path: str, status: int, said: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as stub:
            found, body = await ask(stub, method, path)
            assert (found, body["version"], said in body["error"]) == (status, 1, True), body

    asyncio.run(scenario())


def connect(stub: Stub) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(TIMEOUT_S)
    client.connect(os.path.relpath(stub.runtime.socket))
    return client


def ended(client: socket.socket) -> bool:
    """Waits until the server has closed the connection; whether it did so without a word."""
    with client, suppress(ConnectionResetError):
        return client.recv(1) == b""
    return True


def test_a_connection_that_asks_nothing_is_closed_and_too_many_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as stub:
            # Those that have asked stay, however long.
            followers = [stream(stub.runtime, "/v1/events?follow=1") for _ in range(2)]
            stub.events.add(News(EventKind.BOOTING))
            for follower in followers:
                await asyncio.to_thread(next, follower)
            # Nothing at all, and half a request.
            for words in (b"", b"GET /v1/health HTTP/1.1\r\n"):
                client = connect(stub)
                client.sendall(words)
                assert await asyncio.to_thread(ended, client)
            monkeypatch.setattr(control, "REQUEST_S", 60.0)
            # One that asks nothing makes room for the next; who cannot is turned away.
            silent, third = connect(stub), connect(stub)
            assert await asyncio.to_thread(ended, silent)
            third.sendall(b"GET /v1/events?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await asyncio.to_thread(third.recv, 4096)
            with third:
                assert await asyncio.to_thread(ended, connect(stub))
            stub.events.add(News(EventKind.READY))
            for follower in followers:
                assert (await asyncio.to_thread(next, follower))["event"] == "ready"
                follower.close()

    monkeypatch.setattr(control, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(control, "REQUEST_S", 0.1)
    asyncio.run(scenario())


def test_what_is_no_http_is_answered_and_not_reported_but_our_own_errors_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def send(client: socket.socket, words: bytes) -> bytes:
        with client:
            client.sendall(words)
            return client.recv(4096)

    async def gone(_: str) -> str | None:
        raise ConnectionResetError

    async def scenario() -> None:
        async with serving(tmp_path, restart=gone) as stub:
            for words in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"GET /[ HTTP/1.1\r\n\r\n"):
                assert b" 400 " in await asyncio.to_thread(send, connect(stub), words)
            request = b"POST /v1/restart?stage=alpha HTTP/1.1\r\nHost: x\r\n\r\n"
            assert b" 500 " in await asyncio.to_thread(send, connect(stub), request)
            assert caplog.records == []
            stub.health = {}
            request = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"
            assert b" 500 " in await asyncio.to_thread(send, connect(stub), request)
            (record,) = caplog.records
            assert "KeyError" in str(record.exc_info)

    asyncio.run(scenario())


def test_a_socket_that_cannot_be_made_is_the_configs_fault(tmp_path: Path) -> None:
    runtime = Runtime.of("site", tmp_path)
    runtime.create()
    runtime.socket.mkdir()
    with pytest.raises(ConfigError, match=r"control\.sock: cannot be made: Is a directory; remove what is there"):
        ControlSocket(runtime).bind()


def test_a_restart_is_begun_or_refused_with_the_reason(tmp_path: Path) -> None:
    answers: list[str | None] = [None, "alpha is not ready"]

    async def restart(_: str) -> str | None:
        return answers.pop(0)

    async def scenario() -> None:
        async with serving(tmp_path, restart=restart) as stub:
            assert await ask(stub, "POST", "/v1/restart?stage=alpha") == (202, {"version": 1, "restarting": "alpha"})
            assert (await ask(stub, "POST", "/v1/restart?stage=alpha"))[1]["error"] == "alpha is not ready"
            assert (await ask(stub, "POST", "/v1/restart"))[0] == 404

    asyncio.run(scenario())


def test_events_and_logs_are_followed_until_the_server_closes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as stub:
            log = stub.runtime.log("alpha")
            log.write_text("1\n2\n")
            stub.events.add(News(EventKind.BOOTING))
            assert [record["event"] for record in await read(stub, "/v1/events?follow=0")] == ["booting"]
            assert await read(stub, "/v1/logs?lines=1") == [{"stage": "alpha", "line": "2"}]
            heard = asyncio.Event()
            loop = asyncio.get_running_loop()

            def follow(path: str, last: str) -> list[Any]:
                found = []
                for record in stream(stub.runtime, path):
                    found.append(record.get("line", record.get("event")))
                    if found[-1] == last:
                        loop.call_soon_threadsafe(heard.set)
                return found

            lines = asyncio.create_task(asyncio.to_thread(follow, "/v1/logs?follow=1", "2"))
            await heard.wait()
            heard.clear()
            news = asyncio.create_task(asyncio.to_thread(follow, "/v1/events?follow=1", "started"))
            stub.events.add(News(EventKind.STARTED, "alpha", 1))
            await heard.wait()
            with log.open("a") as file:
                file.write("3\nlast")
            stub.events.add(News(EventKind.ENDED))
        assert await news == ["booting", "started", "ended"]
        assert await lines == ["1", "2", "3", "last"]

    asyncio.run(scenario())


def test_a_follower_that_goes_away_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as stub:
            before = asyncio.all_tasks()
            records = stream(stub.runtime, "/v1/events?follow=1")
            stub.events.add(News(EventKind.BOOTING))
            await asyncio.to_thread(next, records)
            assert asyncio.all_tasks() - before
            records.close()
            async with asyncio.timeout(30):
                while left := asyncio.all_tasks() - before:
                    await asyncio.wait(left)

    asyncio.run(scenario())


OTHER_USER = """
import os, socket, sys
os.fchdir(int(sys.argv[1]))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
peer.connect("control.sock")
peer.sendall(b"GET /v1/status HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
with peer.makefile() as answer:
    print(answer.read())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused_even_where_the_files_would_let_him_in(tmp_path: Path) -> None:
    async def scenario() -> str:
        async with serving(tmp_path) as stub:
            assert stub.runtime.socket.stat().st_mode & 0o777 == 0o600
            stub.runtime.directory.chmod(0o711)
            stub.runtime.socket.chmod(0o666)
            directory = os.open(stub.runtime.directory, os.O_PATH)
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", OTHER_USER, str(directory), pass_fds=(directory,), stdout=subprocess.PIPE
            )
            os.close(directory)
            stdout, _ = await child.communicate()
            assert child.returncode == 0
            return stdout.decode()

    head, _, body = asyncio.run(scenario()).partition("\n\n")
    assert " 403 " in head.splitlines()[0]
    assert json.loads(body) == {"version": 1, "error": "uid 65534 may not control this deployment"}


# What a deployment is found by


@dataclass
class Kept:
    stub: Stub
    keeper: Keeper
    said: list[str]
    restored: list[bool]


@asynccontextmanager
async def kept(place: Path) -> AsyncIterator[Kept]:
    async with serving(place) as stub:
        said, restored = list[str](), list[bool]()
        with stub.runtime.claim() as lock:
            stub.runtime.write_state("ready")
            keeper = Keeper(stub.runtime, lock, stub.endpoint, said.append, lambda: restored.append(True))
            yield Kept(stub, keeper, said, restored)


def claim_elsewhere(runtime: Runtime) -> subprocess.CompletedProcess[str]:
    script = (
        "import sys; from pathlib import Path; from stagelaunch.supervisor.runtime import Runtime\n"
        "runtime = Runtime(Path(sys.argv[1])); runtime.create(); runtime.claim(); print('claimed')"
    )
    command = [sys.executable, "-c", script, str(runtime.directory)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_socket_that_is_deleted_or_replaced_is_made_again(tmp_path: Path, replaced: bool) -> None:
    async def scenario() -> None:
        async with kept(tmp_path) as found:
            path = found.stub.runtime.socket
            await found.keeper.look()
            assert found.said == []
            path.unlink()
            if replaced:
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.bind(str(path))
            await found.keeper.look()
            assert (await ask(found.stub, "GET", "/healthz"))[0] == 200
            assert path.stat().st_mode & 0o777 == 0o600
            await found.keeper.look()
            assert found.said == [f"{path} was deleted or replaced: made again"]
        assert not path.exists()

    asyncio.run(scenario())


def test_a_runtime_directory_that_is_deleted_is_made_again_and_is_the_supervisors_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kept(tmp_path) as found:
            runtime = found.stub.runtime
            shutil.rmtree(runtime.directory)
            await found.keeper.look()
            assert (await ask(found.stub, "GET", "/healthz"))[0] == 200
            assert len(found.restored) == 1
            runtime.write_state("ready")
            refused = await asyncio.to_thread(claim_elsewhere, runtime)
            assert f"supervisor pid {os.getpid()}" in refused.stderr
            assert "claimed" not in refused.stdout
            await found.keeper.look()
            assert len(found.said) == 2

    asyncio.run(scenario())


def test_a_runtime_directory_that_another_supervisor_has_is_said_once_and_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kept(tmp_path) as found:
            runtime = found.stub.runtime
            shutil.rmtree(runtime.directory)
            runtime.create()
            with replace(runtime).claim():
                runtime.write_state("ready")
                await found.keeper.look()
                await found.keeper.look()
                assert not runtime.socket.exists()
            assert (len(found.said), "is running already" in found.said[0]) == (1, True)
            assert found.restored == []
            runtime.lock.unlink()
            await found.keeper.look()
            assert runtime.socket.exists()

    asyncio.run(scenario())


def test_a_second_start_is_refused_by_the_claim_of_one_that_has_lost_its_directory(tmp_path: Path) -> None:
    locks, runtime = LockDirectory(tmp_path / "locks"), Runtime.of("omni", tmp_path)
    refuse_if_claimed(tmp_path / "nowhere", "omni", runtime)
    runtime.create()
    with hold_claims(locks, "c1", "omni", {"GPU-0a": Share(1, 0)}, "", runtime.identity):
        shutil.rmtree(runtime.directory)
        runtime.create()
        with pytest.raises(AlreadyRunningError, match=f"supervisor pid {os.getpid()}"):
            refuse_if_claimed(locks, "omni", runtime)
        assert claiming_pid(locks, "other", runtime.identity) is None
        # Of the same name in another place, and from before records said where.
        refuse_if_claimed(locks, "omni", Runtime.of("omni", tmp_path / "elsewhere"))
    refuse_if_claimed(locks, "omni", runtime)
    with hold_claims(locks, "c1", "omni", {"GPU-0a": Share(1, 0)}):
        refuse_if_claimed(locks, "omni", runtime)


CLAIMANTS = """
import os, sys
from pathlib import Path
from stagelaunch.core.errors import AlreadyRunningError
from stagelaunch.supervisor.runtime import Runtime
runtime = Runtime(Path(sys.argv[1]))
start, go = os.pipe()
for _ in range(50):
    if os.fork() == 0:
        os.close(go)
        os.read(start, 1)
        try:
            lock = runtime.claim()
            runtime.write_state("admitting")
            os.write(1, f"{os.getpid()} won\\n".encode())
            sys.stdin.read()
        except AlreadyRunningError as error:
            os.write(1, f"{os.getpid()} {error}\\n".encode())
        os._exit(0)
os.close(go)
for _ in range(50):
    os.wait()
"""


def test_of_fifty_simultaneous_claims_one_wins_and_the_others_name_it(tmp_path: Path) -> None:
    runtime = Runtime.of("site", tmp_path)
    runtime.create()
    # Of a run that ended: nobody may take its pid for the winner's.
    runtime.state.write_text(json.dumps({"state": "ended", "pid": 1, "start": 0, "boot": boot_id()}))
    command = [sys.executable, "-c", CLAIMANTS, str(runtime.directory)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as children:
        assert children.stdout is not None
        said = dict(children.stdout.readline().strip().split(" ", 1) for _ in range(50))
        children.communicate(timeout=TIMEOUT_S)
    (winner,) = [pid for pid, text in said.items() if text == "won"]
    losers = [text for pid, text in said.items() if pid != winner]
    assert len(losers) == 49
    assert [text for text in losers if f"is running already (supervisor pid {winner})" not in text] == []


def test_of_four_simultaneous_starts_one_stays(tmp_path: Path) -> None:
    site = Site(tmp_path, [light_stage(0, "alpha", 0, utilization=0.6)])
    machine = load_deployment(site.write()).machine(tmp_path / "devices")
    assert machine is not None
    # The winner waits for memory that others hold: it needs no engine for that.
    devices = SimulatedFile.open(machine)
    devices.set_foreign_bytes(0, 512 * MIB)
    devices.close()
    starts = [site.start("up", str(site.config), "--wait-for-memory", "60s") for _ in range(4)]
    with ExitStack() as stack:
        for start in starts:
            stack.callback(start.communicate)
            stack.callback(start.kill)
        pid_of = {os.pidfd_open(start.pid): start for start in starts}
        for fd in pid_of:
            stack.callback(os.close, fd)
        ended = wait_for_all_but_one(list(pid_of))
        assert len(ended) == len(starts) - 1
        owner = site.state()["pid"]
        for fd in ended:
            _, stderr = pid_of[fd].communicate(timeout=TIMEOUT_S)
            assert (pid_of[fd].returncode, f"supervisor pid {owner}" in stderr) == (75, True), stderr
        waits = site.run("wait", str(site.config), "--for", "ready", "--timeout", "10ms")
        assert (waits.code, "it waits for device memory" in waits.stderr) == (75, True), waits.stderr
        ready = site.start("wait", str(site.config), "--for", "ready")
        stopped = site.start("wait", str(site.config), "--for", "stopped")
        assert site.run("down", str(site.config)).code == 0
        assert (ready.wait(TIMEOUT_S), stopped.wait(TIMEOUT_S)) == (130, 0)
        for command in (ready, stopped):
            command.communicate()


def wait_for_all_but_one(fds: list[int]) -> set[int]:
    ended: set[int] = set()
    while len(ended) < len(fds) - 1:
        ended |= set(select.select([fd for fd in fds if fd not in ended], [], [], TIMEOUT_S)[0])
    return ended


# Waiting


def test_waiting_for_what_has_ended_gives_its_code_and_its_first_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = Runtime.of("omni", tmp_path)
    runtime.create()
    failure = {"stage": "talker", "phase": "load", "text": "no room\nat all"}
    runtime.state.write_text(json.dumps({"state": "ended", "exit_code": 124, "pid": 1, "first_failure": failure}))
    assert wait_until(runtime, "ready", 5) == 124
    told = "omni is not running; its last run ended (exit 124): stage talker failed in phase load: no room\n"
    assert told in capsys.readouterr().err
    assert wait_until(runtime, "stopped", 5) == 0
    runtime.state.write_text(json.dumps({"state": "booting", "pid": 1}))
    assert wait_until(runtime, "ready", 5) == 70
    # It was ready, and is not: no reason to go on.
    runtime.state.write_text(json.dumps({"state": "ended", "exit_code": 0, "pid": 1}))
    assert wait_until(runtime, "ready", 5) == 1
    runtime.state.write_text(json.dumps({"state": "ended", "exit_code": 2, "pid": 1, "reason": "no room\nhere"}))
    assert wait_until(runtime, "ready", 5) == 2
    assert capsys.readouterr().err.endswith("(exit 2): no room\n")
    body = {"name": "omni", "state": "stopped", "last_run": runtime.read_state()}
    assert status._page(body) == "omni: not running; the last run ended with exit code 2: no room"


def test_of_all_deployments_those_that_ended_are_shown_but_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [{"name": "new", "state": "ready"}, {"name": "old", "state": "stopped", "last_run": {"state": "ended"}}]
    monkeypatch.setattr(status, "list_runtimes", lambda _: range(len(bodies)))
    monkeypatch.setattr(status, "_body", bodies.__getitem__)
    assert main(["status", "--json"]) == 0
    bodies.append({"name": "dead", "state": "stopped", "last_run": {"state": "died", "processes": ["pid 7"]}})
    assert main(["status", "--json"]) == 1
    del bodies[0], bodies[1]
    assert main(["status", "--json"]) == 1


def test_a_deployment_that_starts_a_stage_again_is_shown_with_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "render_status", lambda body: f"stages of {body['name']}")
    assert status._page({"name": "omni", "state": "restarting", "pid": 1, "stages": []}) == "stages of omni"
    waits = {"name": "omni", "state": "restarting", "pid": 1, "findings": None}
    assert status._page(waits) == "omni: waiting for its restart (supervisor pid 1)"


def test_a_refusal_of_the_supervisor_is_an_error_of_the_command(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as stub:
            with pytest.raises(ControlError, match="refuses"):
                await asyncio.to_thread(request, stub.runtime, "POST", "/v1/restart?stage=alpha")

    asyncio.run(scenario())


# All of it, in one boot


def heard_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if text in line:
            return said
    raise AssertionError(f"never said {text!r}: {said}")


def delete(directory: Path) -> None:
    """At one stroke: file by file, the supervisor that lives in it would put back the first before the last is gone."""
    gone = directory.parents[1] / "gone"
    directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def test_a_boot_is_followed_and_waited_for_and_survives_the_loss_of_its_directory(tmp_path: Path) -> None:
    fifo = tmp_path / "hold"
    os.mkfifo(fifo)
    site = Site(tmp_path, [light_stage(0, "alpha", 0, options={"hold": str(fifo), "words": "hello from the stage"})])
    config, runtime = str(site.write()), Runtime.of("site", tmp_path / "run")
    up = site.start("up", config)
    with ExitStack() as stack:
        stack.callback(up.kill)
        before = heard_until(up, "context -> load")
        status, body = exchange(runtime, "GET", "/readyz")
        (stage,) = body["stages"]
        assert (status, body["state"], stage["name"], stage["phase"]) == (503, "booting", "alpha", "load")
        assert stage["phase_elapsed_s"] >= 0
        assert exchange(runtime, "GET", "/v1/health")[0] == 200
        late = site.run("wait", config, "--for", "ready", "--timeout", "1ms")
        assert (late.code, "alpha in phase load for" in late.stderr) == (75, True), late.stderr
        events = started(site, stack, "events", config)
        logs = started(site, stack, "logs", "alpha", "-f", "--runtime-dir", str(tmp_path / "run"))
        assert events.stdout is not None
        assert logs.stdout is not None
        assert json.loads(events.stdout.readline())["event"] == "admitting"
        assert logs.stdout.readline().startswith("---- ")
        assert logs.stdout.readline() == "hello from the stage\n"

        owner = site.state()["pid"]
        delete(runtime.directory)
        second = site.run("up", config)
        assert (second.code, f"supervisor pid {owner}" in second.stderr) == (75, True), second.stderr
        heard_until(up, "control.sock was deleted or replaced: made again")
        waits = {state: started(site, stack, "wait", config, "--for", state) for state in ("ready", "stopped")}
        with fifo.open("wb") as hold:
            hold.write(b".")
        assert waits["ready"].wait(TIMEOUT_S) == 0
        assert exchange(runtime, "GET", "/v1/ready")[0] == 200
        assert logs.stdout.readline() == "hello from the stage again\n"
        down = site.run("down", config)
        _, said = up.communicate(timeout=TIMEOUT_S)
        assert (down.code, up.returncode, waits["stopped"].wait(TIMEOUT_S)) == (0, 0, 0), said
        # The log and what the stage reports come in either order: it may be the first line of the rest.
        assert "\nalpha | hello from the stage again\n" in f"\n{said}"

        records = list(map(json.loads, events.stdout))
        assert (events.wait(TIMEOUT_S), logs.wait(TIMEOUT_S)) == (0, 0)
        assert [record["seq"] for record in records] == list(range(2, len(records) + 2))
        of_stage = [record["event"] for record in records if record.get("stage") == "alpha"]
        of_whole = [record["event"] for record in records if "stage" not in record]
        assert of_whole == ["booting", "ready", "stopping", "ended"]
        assert (of_stage[0], of_stage[-2:]) == ("started", ["ready", "ended"])
        assert {"phase", "lock_taken", "sized"} <= set(of_stage)
        assert records[-1]["exit_code"] == 0
        site.assert_nothing_left(Ran(0, "", before + said))


def started(site: Site, stack: ExitStack, *words: str) -> subprocess.Popen[str]:
    process = site.start(*words)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def test_down_signals_nobody_whom_a_state_only_names(tmp_path: Path) -> None:
    site = Site(tmp_path, [light_stage(0, "alpha", 0)])
    site.write()
    runtime = Runtime.of("site", tmp_path / "run")
    runtime.create()
    innocent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        named = {"pid": innocent.pid, "start": start_time(innocent.pid), "boot": boot_id()}
        runtime.state.write_text(json.dumps({"state": "admitting", **named}))
        assert site.run("down", str(site.config), "--timeout", "1").code == 1
        assert innocent.poll() is None
    finally:
        innocent.communicate(b"\n")
    assert innocent.returncode == 0
