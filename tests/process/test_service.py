"""What a service manager hears, over a real datagram socket; no service manager runs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from deployments import ROOT, Ran, Site, light_stage
from service_manager import Manager

from stagelaunch.core import board
from stagelaunch.core import messages as m
from stagelaunch.core.board import StageView
from stagelaunch.core.config import Timeouts
from stagelaunch.core.phases import Phase
from stagelaunch.supervisor.notify import NotifySocket, ServiceLink, read_link
from stagelaunch.supervisor.service import ServiceNotifier

WATCHDOG_S = 0.15


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@stagelaunch-{uuid.uuid4()}"
    manager = Manager(address)
    yield manager
    manager.close()


@contextmanager
def deployment(manager: Manager, views: dict[int, StageView | None]) -> Iterator[Running]:
    """A notifier on a loop of its own, as in a supervisor whose stages are ``views``."""
    running = Running(manager.address, views)
    try:
        yield running
    finally:
        running.end()


class Running:
    def __init__(self, address: str, views: dict[int, StageView | None]) -> None:
        self.said: list[str] = []
        self.stop_reason: str | None = None
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.notifier = ServiceNotifier(NotifySocket(address, self.said.append), WATCHDOG_S, Timeouts())
        self.do(lambda: self.notifier.admitting())
        self.boot(views)

    def boot(self, views: dict[int, StageView | None]) -> None:
        self.do(lambda: self.notifier.booting(lambda: views, lambda: self.stop_reason))

    def do(self, what: object) -> None:
        async def call() -> None:
            assert callable(what)
            what()

        asyncio.run_coroutine_threadsafe(call(), self.loop).result(timeout=10)

    def end(self) -> None:
        async def cancel_all() -> None:
            self.notifier.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), self.loop).result(timeout=10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def loading(done: int) -> StageView:
    view = board.apply(board.spawned(0, "thinker", 1.0), m.PhaseBegan(Phase.LOAD, 2.0))
    return board.apply(view, m.Progress(Phase.LOAD, done, 100, "bytes", 3.0))


def beats_without(manager: Manager, name: str) -> None:
    """It is alive for ten more ticks and never says ``name``."""
    before = len(manager.lines(name))
    for _ in range(10):
        manager.until("WATCHDOG=1")
    assert len(manager.lines(name)) == before


def test_more_time_is_asked_for_only_while_the_boot_gets_on(manager: Manager) -> None:
    views: dict[int, StageView | None] = {0: loading(43), 1: None}
    with deployment(manager, views) as running:
        manager.until("STATUS=booting: 0 of 2 ready; thinker: load 43 %")
        beats_without(manager, "EXTEND_TIMEOUT_USEC")
        views[0] = loading(44)
        (*_, more) = manager.until("EXTEND_TIMEOUT_USEC=")
        # The longest a healthy phase may show nothing, and a slack.
        assert more.value("EXTEND_TIMEOUT_USEC") == str(315_000_000)
        manager.until("STATUS=booting: 0 of 2 ready; thinker: load 44 %")

        views.update({0: board.apply(loading(100), m.Ready(9.0)), 1: board.apply(loading(9), m.Ready(9.0))})
        running.do(running.notifier.ready)
        manager.until("READY=1")
        # All stages are started again, as after a failure: from here on more time would only put the watchdog off.
        views[0] = loading(45)
        running.boot(views)
        manager.until("STATUS=booting: 1 of 2 ready; thinker: load 45 %")
        views[0] = loading(46)
        beats_without(manager, "EXTEND_TIMEOUT_USEC")
        running.do(running.notifier.ready)
        manager.until("STATUS=ready: 2 stages")
        assert manager.lines("READY") == ["1"]

        running.do(running.notifier.reloading)
        (*_, reloading) = manager.until("RELOADING=1")
        assert int(reloading.value("MONOTONIC_USEC") or 0) > 0
        running.do(lambda: running.notifier.reloaded(Timeouts()))
        manager.until("READY=1")

        running.stop_reason = "stage talker failed\nin phase load"
        (*_, stopping) = manager.until("STOPPING=1")
        assert stopping.value("STATUS") == "stopping: stage talker failed in phase load"
        # stop 15 + kill 10 + memory 15 + driver 30 + slack 10: our ladder's bound, once.
        assert stopping.value("EXTEND_TIMEOUT_USEC") == str(82_000_000)
        beats_without(manager, "EXTEND_TIMEOUT_USEC")
    assert {(heard.pid, heard.uid) for heard in manager.heard} == {(os.getpid(), os.getuid())}


def test_a_loop_that_is_stuck_falls_silent(manager: Manager) -> None:
    with deployment(manager, {0: loading(1)}) as running:
        manager.until("WATCHDOG=1")
        stuck, release = threading.Event(), threading.Event()
        running.loop.call_soon_threadsafe(lambda: (stuck.set(), release.wait()))
        assert stuck.wait(10)
        manager.drain()
        with pytest.raises(TimeoutError):
            manager.next(timeout_s=3 * WATCHDOG_S)
        release.set()
        manager.until("WATCHDOG=1")


def test_a_manager_that_does_not_read_holds_nothing_up_and_still_learns_that_it_is_ready(manager: Manager) -> None:
    with deployment(manager, {0: loading(1)}) as running:
        manager.until("WATCHDOG=1")
        manager.fill()
        running.do(running.notifier.ready)
        running.do(lambda: None)
        assert running.said == [
            f"cannot notify the service manager at {manager.address}: it does not read; going on without it"
        ]
        manager.drain()
        manager.until("READY=1")
        beats_without(manager, "READY")


@pytest.mark.parametrize("address", ["vsock:2:1234", "relative", "@", ""])
def test_other_kinds_of_address_are_refused_and_a_dead_one_is_said_once(address: str, tmp_path: Path) -> None:
    said: list[str] = []
    refused = NotifySocket(address, said.append)
    assert refused.send("READY=1")
    assert len(said) == 1
    assert "only a path or an @abstract name" in said[0]

    for dead in (str(tmp_path / "nowhere"), "@nobody-listens-here", "/" + "x" * 200, "/nul\0in it"):
        said.clear()
        gone = NotifySocket(dead, said.append)
        assert [gone.send("READY=1"), gone.send("READY=1")] == [False, False]
        assert [line.partition(": ")[0] for line in said] == [f"cannot notify the service manager at {dead}"]
        gone.close()


@pytest.mark.parametrize(
    ("environment", "link"),
    [
        ({}, ServiceLink()),
        ({"NOTIFY_SOCKET": ""}, ServiceLink()),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000"}, ServiceLink("/x", 2.0)),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "7"}, ServiceLink("/x", 2.0)),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "8"}, ServiceLink("/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "0"}, ServiceLink("/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, ServiceLink("/x")),
        ({"WATCHDOG_USEC": "2000000"}, ServiceLink()),
    ],
)
def test_what_a_service_manager_sets_is_read(environment: Mapping[str, str], link: ServiceLink) -> None:
    assert read_link(environment, 7) == link


def test_a_boot_as_a_service(tmp_path: Path) -> None:
    """Whole: a stage that hangs for a while, then is ready, then is stopped."""
    site = Site(tmp_path, [light_stage(0, "alpha", 0, options={"hold": str(tmp_path / "hold")})])
    os.mkfifo(tmp_path / "hold")
    manager = Manager(str(tmp_path / "notify"))
    process = subprocess.Popen(
        [sys.executable, "-m", "stagelaunch", "up", str(site.write())],
        cwd=ROOT, env={**site.environment(), **manager.environment(0.6)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        manager.until("STATUS=booting: 0 of 1 ready; alpha: load")
        beats_without(manager, "EXTEND_TIMEOUT_USEC")
        assert manager.lines("READY") == []
        (stage,) = Path(f"/proc/{manager.heard[-1].pid}/task/{manager.heard[-1].pid}/children").read_text().split()[-1:]
        names = {entry.partition(b"=")[0] for entry in Path(f"/proc/{stage}/environ").read_bytes().split(b"\0")}
        assert b"PYTHONPATH" in names
        assert names.isdisjoint({b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"WATCHDOG_PID"})
        (tmp_path / "hold").write_bytes(b".")
        manager.until("READY=1")
        process.send_signal(signal.SIGTERM)
        (*_, last) = manager.until("STOPPING=1")
        assert last.value("STATUS") == "stopping: SIGTERM"
    finally:
        if not manager.lines("STOPPING"):
            process.kill()
        stdout, stderr = process.communicate(timeout=60)
        manager.close()
    assert process.returncode == 0, stderr
    assert manager.lines("READY") == ["1"]
    assert len({heard.pid for heard in manager.heard}) == 1
    assert {heard.uid for heard in manager.heard} == {os.getuid()}
    site.assert_nothing_left(Ran(process.returncode, stdout, stderr))
