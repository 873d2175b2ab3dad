"""Boots that fail, one after another in one supervisor process, and what that process has gathered after each.

A program: CONFIG ROUNDS, one JSON object a round on stdout. Not the warden's business: it is what `restart-all` does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

import psutil

from stagelaunch.cli.machine import simulated_machine
from stagelaunch.cli.target import find_target
from stagelaunch.supervisor.run import Listener, RunOptions, run_deployment


def gathered(site: Path) -> dict[str, object]:
    me = psutil.Process()
    children = [child.name() for child in me.children(recursive=True) if child.status() == psutil.STATUS_ZOMBIE]
    return {
        "descriptors": sorted(_targets()),
        "threads": threading.active_count(),
        "zombies": children,
        "shared memory": sorted(os.listdir("/dev/shm")),
        "locks": sorted(path.name for path in (site / "locks").iterdir()),
        "runtime": sorted(str(path.relative_to(site)) for path in (site / "run").rglob("*")),
    }


def _targets() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own
            continue
        # Numbers of sockets and pipes differ; how many of each there are must not.
        found.append(target.partition(":")[0])
    return found


def main() -> None:
    config, rounds = sys.argv[1], int(sys.argv[2])
    target = find_target(config, None)
    assert target.loaded is not None
    listener = Listener(lambda _: None, lambda: None, lambda _: None)
    for _ in range(rounds):
        machine = simulated_machine(target.loaded)
        outcome = asyncio.run(run_deployment(target.loaded, machine, target.runtime, listener, RunOptions()))
        body = {"code": int(outcome.exit_code), "error": outcome.first and outcome.first.error}
        print(json.dumps(body | gathered(Path(config).parent)), flush=True)


if __name__ == "__main__":
    main()
