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
import json, os, signal, sys, threading
from stagelaunch.cli.become_warden import become_warden
from stagelaunch.supervisor.notify import read_link
os.environ.setdefault("WATCHDOG_PID", str(os.getpid()))
here = os.getpid()
{changes}
if os.getppid() == int(sys.argv[2]):
    print("said before", flush=False)
link = read_link(os.environ, os.getpid())
run = become_warden("-site.yaml")
os.close(int(sys.argv[1]))
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
print(json.dumps([run.warden, os.getppid(), run.run_id, sorted(blocked), dict(os.environ)]), flush=True)
print(json.dumps([link.address, link.watchdog_s, here == os.getpid()]), flush=True)
sys.stdin.read()
os._exit(9)
"""


CHANGES = {
    "exec": "",
    "no exec": "def broken(*_): raise OSError\nos.execv = broken",
    # It never ends, and may hold any lock.
    "threads": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
}


@pytest.mark.parametrize("how", CHANGES)
def test_one_process_becomes_two(how: str) -> None:
    fails = how == "no exec"
    held, passed = os.pipe()
    told = {"NOTIFY_SOCKET": "@/a/socket", "WATCHDOG_USEC": "5000"}
    # What was not flushed before the fork would be said twice.
    buffered = {"PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(changes=CHANGES[how]), str(passed), str(os.getpid())],
        cwd=ROOT, env={**os.environ, **told, **buffered},
        pass_fds=(passed,), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
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
    assert {*told, "WATCHDOG_PID"}.isdisjoint(environment)
    # With threads there the supervisor is a program started afresh, which has the same link.
    assert json.loads(process.stdout.readline()) == ["@/a/socket", 0.005, how == "threads"]
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


def test_no_room_for_a_process_is_one_line() -> None:
    code = "import os, sys\ndef fork(): raise BlockingIOError(11, os.strerror(11))\nos.fork = fork\n"
    code += "from stagelaunch.cli.main import main\nsys.exit(main(['up', 'site.yaml']))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr.count("\n")) == (75, 1)
    assert "cannot start the supervisor: Resource temporarily unavailable; try again" in ran.stderr


SCRIPT = """
import json, os, sys, threading
from stagelaunch.cli.become_warden import become_warden
{changes}
before = list(sys.path)
become_warden("site.yaml")
print(json.dumps([before, sys.path]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["exec", "threads"])
def test_what_lies_beside_the_script_is_not_found_by_stages(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script"
    script.write_text(SCRIPT.format(changes=CHANGES[how]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True
    )
    before, after = json.loads(ran.stdout)
    assert before[0] == str(tmp_path.resolve())
    assert after == before[1:]
