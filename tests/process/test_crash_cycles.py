"""Failed boots gather nothing: descriptors, threads, zombies, shared memory, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deployments import HERE, ROOT, in_full_only
from faults import Cell, FaultySite

PATIENCE_S = 20.0
FULL = os.environ.get("STAGELAUNCH_SOAK") == "1"


@pytest.mark.timeout(1200 if FULL else 120)
@pytest.mark.parametrize(
    ("phase", "rounds"), [("spawn", 50 if FULL else 2), pytest.param("capture", 50, marks=in_full_only)]
)
def test_boots_that_fail_leave_the_supervisor_as_it_was(tmp_path: Path, phase: str, rounds: int) -> None:
    site = FaultySite(tmp_path, Cell("beta", phase, "osexit"))
    site.stages = [site.stages[1]]
    command = [sys.executable, str(HERE / "crash_cycles.py"), str(site.write()), str(rounds)]
    environment = site.environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(found)) == (0, rounds), done.stderr
    first, last = found[0], found[-1]
    assert (first["code"], first["error"]) == (1, "exit")
    # Others on the machine have their own, for a while.
    since = set(last.pop("shared memory")) - set(first.pop("shared memory"))
    assert not that_stay(since)
    # The first round may make what lasts: the resource tracker's pipe, the directories.
    assert last == first


def that_stay(names: set[str]) -> set[str]:
    """Of these files in shared memory, those that are there all the time until patience ends."""
    deadline_s = time.monotonic() + PATIENCE_S
    while names and time.monotonic() < deadline_s:
        names &= set(os.listdir("/dev/shm"))
        os.sched_yield()
    return names
