"""How long three workers take until torch and the model's library are usable: forked, beside spawned one by one.

A program for ``scripts/bench start``. Turn by turn, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from deployments import HERE, ROOT
from test_forkserver import stage_run

from stagelaunch.supervisor.forkserver import Forked, Forkservers

WORKERS = 3
SPAWNED = """
from stagelaunch.engines.base import import_engine
import_engine("qwen3-omni")
import torch
assert int(torch.ones(2).sum()) == 2
"""


def serial_s() -> float:
    """Spawned, each when the one before it is usable."""
    began_s = time.monotonic()
    for _ in range(WORKERS):
        subprocess.run([sys.executable, "-c", SPAWNED], check=True, cwd=ROOT)
    return time.monotonic() - began_s


async def forked_s(directory: Path) -> tuple[float, float]:
    """Until all are usable, the forkserver's own start included; then until one more is."""
    runs = [stage_run(number, "qwen3-omni") for number in range(WORKERS)]
    began_s = time.monotonic()
    forkservers = Forkservers(runs, directory / "imports.log", print, preload=True)
    try:
        await asyncio.gather(*(_usable(forkservers, run) for run in runs))
        first_s = time.monotonic() - began_s
        began_s = time.monotonic()
        await _usable(forkservers, runs[0])
        return first_s, time.monotonic() - began_s
    finally:
        forkservers.close()


async def _usable(forkservers: Forkservers, run) -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    forked = Forked(theirs, lambda _: None, ended.set_result, lambda why: sys.exit(why))
    forkservers.start(run, Path("/run.json"), forked)
    ours.setblocking(False)
    assert await loop.sock_recv(ours, 10) == b"2"
    ours.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ratios and the spread."""
    parser = argparse.ArgumentParser(prog="scripts/bench start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    os.environ.update(
        STAGELAUNCH_TEST_WORKER="usable_worker.py", PYTHONPATH=os.pathsep.join(map(str, (HERE / "trivial", HERE, ROOT)))
    )
    serial, first, again = [], [], []
    for _ in range(args.rounds):
        serial.append(serial_s())
        with tempfile.TemporaryDirectory() as name:
            for value, values in zip(asyncio.run(forked_s(Path(name))), (first, again), strict=True):
                values.append(value)
    print(
        f"scripts/bench start --rounds {args.rounds}: relative to {WORKERS} workers spawned one by one; min median max"
    )
    for what, values in (("all forked, first time", first), ("one more", again)):
        ratios = [value / each for value, each in zip(values, serial, strict=True)]
        print(f"{what:<24} {min(ratios):.4f} {statistics.median(ratios):.4f} {max(ratios):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
