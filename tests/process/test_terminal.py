"""Ctrl-C from a real terminal: at every phase, once, twice and three times; nothing is left, and it says so."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import ROOT, TIMEOUT_S, Ran, Site, in_full_only, light_stage

CTRL_C = b"\x03"


class Terminal:
    """`stagelaunch up` in the foreground of a terminal of its own."""

    def __init__(self, site: Site) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stagelaunch", "up", str(site.write()), "--quiet"],
            cwd=ROOT, env=site.environment(), stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.said = ""

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def wait_for(self, text: str) -> None:
        """Reads until the text has been shown."""
        seen = self.said.count(text)
        while self.said.count(text) == seen:
            assert self._read(), f"ended without {text!r}: {self.said}"

    def _read(self) -> bool:
        ready, _, _ = select.select([self.master], [], [], TIMEOUT_S)
        assert ready, f"silent: {self.said}"
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # how the end of a terminal reads
            return False
        self.said += data.decode(errors="replace")
        return bool(data)

    def finish(self) -> Ran:
        while self._read():
            continue
        return Ran(self.process.wait(TIMEOUT_S), "", self.said)

    def close(self) -> None:
        os.close(self.master)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, [light_stage(0, "alpha", 0)])


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.process.kill()
        terminal.process.wait()
        terminal.close()


def press_at(site: Site, opened: list[Terminal], phase: str, presses: int) -> tuple[Ran, float]:
    """A stage that ignores SIGTERM in this phase; Ctrl-C, each after what the one before it has brought."""
    site.stages[0]["options"] = {"fault": f"{phase}:ignoreterm"}
    site.top["timeouts"] = {"phase": "60s", "stage": "70s", "boot": "80s", "lock": "40s", "stop": "4s", "memory": "5s"}
    terminal = Terminal(site)
    opened.append(terminal)
    terminal.wait_for("-> ready" if phase == "stop" else f"-> {phase}")
    began_s = time.monotonic()
    terminal.press(CTRL_C)
    if presses > 1:
        terminal.wait_for("stopping: Ctrl-C")
        terminal.press(CTRL_C)
    if presses > 2:
        terminal.press(CTRL_C)
    return terminal.finish(), time.monotonic() - began_s


PHASES = ("import", "context", "load", "profile", "size", "allocate", "capture", "stop")
EACH = [(phase, presses) for phase in PHASES for presses in (1, 2, 3)]
SLICE = [("context", 1), ("load", 2), ("capture", 3), ("stop", 2)]


@pytest.mark.parametrize(
    ("phase", "presses"), [pytest.param(*at, marks=[] if at in SLICE else [in_full_only]) for at in EACH]
)
def test_ctrl_c_leaves_nothing_whatever_the_phase(site: Site, opened: list[Terminal], phase: str, presses: int) -> None:
    ran, took_s = press_at(site, opened, phase, presses)
    assert ran.code == 130, ran.stderr
    site.assert_nothing_left(ran, supervisor_was_killed=presses == 3)
    # Once is the ladder, at whose end the stage that ignores SIGTERM is killed; more than once is now.
    assert took_s < (4.0 if presses == 1 else 1.0) + 5.0


def test_ctrl_c_that_ended_a_callback_of_the_import_system_is_taken_at_the_start() -> None:
    # The callback is left with the lock it had taken: whatever thread imports then would wait for ever.
    script = "import _imp; _imp.acquire_lock(); from stagelaunch.__main__ import main; main()"
    command = [sys.executable, "-c", script, "schema"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stagelaunch: interrupted\n")


@pytest.mark.parametrize("presses", [1, 2, 3])
def test_ctrl_c_right_after_the_start(site: Site, opened: list[Terminal], presses: int) -> None:
    terminal = Terminal(site)
    opened.append(terminal)
    # The one place where the clock is what is tested: nothing can be waited for that early.
    select.select([], [], [], 0.05)
    for _ in range(presses):
        terminal.press(CTRL_C)
    while terminal._read() and "started on device" not in terminal.said:
        continue
    if "started on device" in terminal.said:
        # Before anything of ours runs, the interpreter can lose it in a callback of its import system, and says so.
        assert "Exception ignored in" in terminal.said
        for _ in range(presses):
            terminal.press(CTRL_C)
    ran = terminal.finish()
    # Before anything of ours runs, the interpreter's own ways to end at SIGINT are all there is.
    assert ran.code in (130, -2) or "init_import_site" in ran.stderr, ran.stderr
    if (site.directory / "locks").exists():
        site.assert_nothing_left(ran, supervisor_was_killed=True)


LOST_IN_AN_IMPORT = """
import os, signal, sys, weakref
class Thing: pass
def hook(event, arguments):
    if event == "import" and arguments[0] == "click":
        thing = Thing()
        # Where the import system itself would lose a KeyboardInterrupt, and so the user's Ctrl-C.
        callback = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
        del thing
sys.addaudithook(hook)
sys.argv = ["stagelaunch", "schema"]
from stagelaunch.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_is_not_lost_in_an_import() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LOST_IN_AN_IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "stagelaunch: interrupted\n")
