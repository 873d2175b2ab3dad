"""A supervisor that has run out of descriptors: for a while it takes no connection, and that is all."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from stagelaunch.core import launch
from stagelaunch.core.board import Timeouts
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.supervisor.supervisor import Hooks, Supervisor
from stagelaunch.supervisor.timeline import TimelineRecorder
from stagelaunch.system import locks


def test_an_accept_without_descriptors_is_said_once_and_no_bug(tmp_path: Path) -> None:
    said: list[str] = []

    def nothing(*_: Any) -> Any:
        return None

    async def scenario() -> None:
        timeline = TimelineRecorder(tmp_path / "timeline", "site", "serial", ((0,),), said.append)
        hooks = Hooks(said.append, nothing, nothing, nothing, nothing, nothing, timeline, nothing)
        policy = launch.LaunchPolicy(((0,),), launch.Order.SERIAL, None, launch.OnFailure.STOP)
        supervisor = Supervisor((), policy, Timeouts(1, 1, 1, 1, 1), Runtime(tmp_path), hooks)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(supervisor._on_bug)
        with socket.socket() as listener:
            for _ in range(2):
                error = OSError(errno.EMFILE, "Too many open files")
                loop.call_exception_handler({"exception": error, "message": "accept", "socket": listener})
        assert not supervisor._finished.done()
        loop.call_exception_handler({"exception": error, "message": "a callback of ours"})
        assert supervisor._finished.exception() is error

    asyncio.run(scenario())
    assert said == ["cannot take a connection to its control socket: Too many open files; trying again"]


def test_a_lock_directory_that_cannot_be_listed_is_swept_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_descriptors(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "glob", out_of_descriptors)
    locks.sweep(tmp_path, "GPU-1", {1})
