"""How ``up`` becomes its warden: the same arguments, and nothing of the service manager's left in the environment."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagelaunch.cli import become_warden as subject
from stagelaunch.cli.up import up

ADDRESS = "@/a/socket"


@pytest.fixture
def _mask() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize(
    "arguments",
    [["site.yaml"], ["--wait-for-memory", "60s", "--runtime-dir", "/run", "--notify-fd", "7", "--", "-site.yaml"]],
)
def test_the_supervisor_is_told_what_we_were_told(arguments: list[str]) -> None:
    with up.make_context("up", list(arguments)) as context:
        again = subject.same_arguments(context)
        with up.make_context("up", list(again)) as second:
            assert second.params == context.params


def test_an_option_that_is_not_there_is_not_passed_on() -> None:
    with up.make_context("up", ["--detach", "x.yaml"]) as context:
        assert subject.same_arguments(context) == ["--detach", "--", "x.yaml"]


@pytest.mark.parametrize(
    ("owner", "usec"), [(str(os.getpid()), "5000"), (None, "5000"), ("1", None)], ids=["us", "any", "other"]
)
@pytest.mark.usefixtures("_mask")
def test_what_the_service_manager_said_goes_to_the_supervisor_and_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch, owner: str | None, usec: str | None
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: ran.append(arguments))
    monkeypatch.setenv("NOTIFY_SOCKET", ADDRESS)
    monkeypatch.setenv("WATCHDOG_USEC", "5000")
    if owner is not None:
        monkeypatch.setenv("WATCHDOG_PID", owner)
    subject.become_warden(["--", "x.yaml"])
    ((program, words, environment),) = ran
    assert program == sys.executable
    assert words[:3] == [sys.executable, "-I", "-S"]
    assert Path(words[3]).name == "warden.py"
    watchdog = [] if usec is None else ["--watchdog-usec", usec]
    assert words[words.index("up") :] == ["up", "--", "--notify-socket", ADDRESS, *watchdog, "--", "x.yaml"]
    assert {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}.isdisjoint(environment)
    # From here on no signal is lost.
    assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
