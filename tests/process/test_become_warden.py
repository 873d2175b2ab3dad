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

from stagelaunch.cli.become_warden import same_command
from stagelaunch.cli.up import up
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
run = become_warden("-site.yaml", lambda: [sys.executable, "-c", sys.orig_argv[2], *sys.argv[1:]])
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
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(changes=CHANGES[how]), str(passed), str(os.getpid())],
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


@pytest.mark.parametrize(
    "arguments",
    [["site.yaml"], ["--wait-for-memory", "60s", "--runtime-dir", "/run", "--notify-fd", "7", "--", "-site.yaml"]],
)
def test_a_command_starts_again_with_what_it_was_told(arguments: list[str]) -> None:
    with up.make_context("up", list(arguments)) as context:
        again = same_command(context)
        with up.make_context("up", again[again.index("up") + 1 :]) as second:
            assert second.params == context.params


SCRIPT = """
import json, os, sys
from stagelaunch.cli.become_warden import become_warden
before = list(sys.path)
become_warden("site.yaml", list)
print(json.dumps([before, sys.path]), flush=True)
os._exit(0)
"""


def test_what_lies_beside_the_script_is_not_found_by_stages(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True
    )
    before, after = json.loads(ran.stdout)
    assert before[0] == str(tmp_path.resolve())
    assert after == before[1:]
