"""How ``up`` divides itself: the warden keeps the pid and does without the rest, the supervisor has what was told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deployments import ROOT, TIMEOUT_S

from stagelaunch.system.tree import RUN_VARIABLE

PROGRAM = """
import json, os, signal, sys
from stagelaunch.cli.become_warden import become_warden
{changes}
print("said before", flush=False)
run = become_warden("-site.yaml")
os.close(int(sys.argv[1]))
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
print(json.dumps([run.warden, os.getppid(), run.run_id, sorted(blocked), dict(os.environ)]), flush=True)
sys.stdin.read()
os._exit(9)
"""


@pytest.mark.parametrize("fails", [False, True], ids=["exec", "no exec"])
def test_one_process_becomes_two(fails: bool) -> None:
    changes = "def broken(*_): raise OSError\nos.execv = broken" if fails else ""
    held, passed = os.pipe()
    told = {"NOTIFY_SOCKET": "@/a/socket", "WATCHDOG_USEC": "5000", "WATCHDOG_PID": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(changes=changes), str(passed)],
        cwd=ROOT, env={**os.environ, **told}, pass_fds=(passed,), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    os.close(passed)
    assert process.stdin is not None
    assert process.stdout is not None
    # Once, though there are two now that could flush it.
    assert process.stdout.readline() == b"said before\n"
    warden, parent, run_id, blocked, environment = json.loads(process.stdout.readline())
    assert warden == parent == process.pid
    # From the first instant no signal is lost.
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2} <= set(blocked)
    assert not {signal.SIGCHLD, signal.SIGTTOU} & set(blocked)
    assert told.keys().isdisjoint(environment)
    assert environment[RUN_VARIABLE] == run_id
    # The warden has closed what it inherited: it has begun.
    assert os.read(held, 1) == b""
    os.close(held)
    words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
    assert ("-site.yaml" in words) is any(word.endswith("warden.py") for word in words) is not fails
    process.stdin.close()
    assert process.wait(TIMEOUT_S) == 9
    assert process.stdout.read() == b""
    process.stdout.close()
