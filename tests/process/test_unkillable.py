"""A stage that not even SIGKILL ends: it is named with its state, left, and the exit code says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from deployments import TIMEOUT_S, Ran, Site, is_gone, light_stage

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup of the old freezer: what is frozen in it sleeps uninterruptibly, as in a driver that hangs."""
    directory = FREEZER / f"stagelaunch-test-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError:
        pytest.skip("no freezer cgroup can be made here")
    yield directory
    (directory / "freezer.state").write_text("THAWED")
    while (directory / "cgroup.procs").read_text():
        os.sched_yield()
    directory.rmdir()


def read_until(stream: IO[str], *texts: str) -> list[str]:
    lines = []
    for line in stream:
        lines.append(line)
        if all(text in line for text in texts):
            return lines
    raise AssertionError(f"ended without {texts}: {''.join(lines)}")


def test_what_survives_sigkill_is_named_with_its_state_and_left(tmp_path: Path, freezer: Path) -> None:
    site = Site(tmp_path, [light_stage(0, "alpha", 0, options={"fault": "load:hang"}), light_stage(1, "beta", 1)])
    process = site.start("up", str(site.write()), "--quiet", "--ci")
    assert process.stderr is not None
    lines = read_until(process.stderr, "alpha", "-> load")
    (pid,) = Ran(0, "", lines[-1]).pids
    (freezer / "cgroup.procs").write_text(str(pid))
    (freezer / "freezer.state").write_text("FROZEN")
    while "FROZEN" not in (freezer / "freezer.state").read_text():
        os.sched_yield()
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    # The warden's last words. Not the end of the pipe: the frozen process was forked from one that has it too.
    lines += read_until(process.stderr, "survived SIGKILL for")
    code = process.wait(TIMEOUT_S)
    took_s, said = time.monotonic() - began_s, "".join(lines)
    assert code == 71, said
    assert f"LEFT BEHIND: stage alpha: process {pid} (alpha) in state D (uninterruptible sleep) survived" in said
    # Its memory is with it; the other stage and its memory are not.
    assert f"LEFT BEHIND: device 0: still held by pid {pid}" in said
    assert "device 1" not in "".join(line for line in said.splitlines() if "LEFT BEHIND" in line)
    # The whole stop of --ci, and what the warden adds; asking the devices takes its own time.
    assert took_s < 4.0 + 1.0 + 4.0
    (freezer / "freezer.state").write_text("THAWED")
    assert is_gone(pid)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
