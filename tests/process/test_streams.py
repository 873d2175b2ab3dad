"""Output that cannot be written, and bugs of our own: neither leaves a deployment behind that nobody watches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deployments import ROOT, TIMEOUT_S, Ran, Site, in_full_only, light_stage


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, [light_stage(0, "alpha", 0)])


@pytest.mark.parametrize("redirection", ["2>/dev/full", pytest.param(">/dev/full", marks=in_full_only), ">&- 2>&- <&-"])
def test_a_deployment_boots_and_stops_in_good_order_without_its_output(site: Site, redirection: str) -> None:
    told, tell = os.pipe()
    command = f'exec "{sys.executable}" -m stagelaunch up --notify-fd {tell} "{site.write()}" {redirection}'
    up = subprocess.Popen(["bash", "-c", command], cwd=ROOT, env=site.environment(), pass_fds=(tell,))
    os.close(tell)
    with os.fdopen(told) as events:
        last = [json.loads(line) for line in events][-1]
    assert "ready" in last, last
    down = site.run("down", str(site.config))
    assert (down.code, up.wait(TIMEOUT_S)) == (0, 0), down.stderr
    site.assert_nothing_left(Ran(0, "", ""))


def test_a_reader_that_went_away_does_not_take_the_deployment_along(site: Site) -> None:
    process = site.start("up", str(site.write()))
    assert process.stdout is not None
    assert process.stderr is not None
    assert "site: ready" in process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    down = site.run("down", str(site.config))
    assert (down.code, process.wait(TIMEOUT_S)) == (0, 0), down.stderr
    assert site.state()["exit_code"] == 0


def test_detaching_with_every_stream_closed_waits_for_the_boot(site: Site) -> None:
    command = f'exec "{sys.executable}" -m stagelaunch up --detach --wait "{site.write()}" <&- >&- 2>&-'
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, env=site.environment(), timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 0
    assert site.run("down", str(site.config)).code == 0


def test_a_full_stdout_is_said_and_is_not_our_bug(site: Site) -> None:
    command = f'exec "{sys.executable}" -m stagelaunch schema >/dev/full'
    ran = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (ran.returncode, "cannot write the output" in ran.stderr) == (75, True)


SABOTAGE = {
    # Our own bug in the middle of a start.
    70: """
from stagelaunch.supervisor.supervisor import Supervisor
say_of = Supervisor._say_of
def broken(self, stage, text):
    say_of(self, stage, text)
    raise RuntimeError("sabotage")
Supervisor._say_of = broken
""",
    # Ctrl-C in the last moment in which asyncio's own handler is still there.
    130: """
import os, signal
from stagelaunch.supervisor.session import Session
listen = Session._listen_to_signals
def late(self):
    os.kill(os.getpid(), signal.SIGINT)
    listen(self)
Session._listen_to_signals = late
""",
}

WITHOUT_WARDEN = """
import os, sys
from stagelaunch import warden
from stagelaunch.cli import up
up.become_warden = lambda config: warden.Run(os.getppid(), "sabotaged", None, False)
"""


@pytest.mark.parametrize("code", SABOTAGE)
def test_nothing_survives_a_supervisor_that_gives_up_while_it_starts(site: Site, code: int) -> None:
    # Without a warden, which would clear up as well.
    program = f"{SABOTAGE[code]}\n{WITHOUT_WARDEN}\nfrom stagelaunch.cli.main import main\nsys.exit(main())"
    process = subprocess.run(
        [sys.executable, "-c", program, "up", str(site.write())],
        cwd=ROOT, env=site.environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert process.returncode == code, process.stderr
    site.assert_nothing_left(Ran(process.returncode, process.stdout, process.stderr))
