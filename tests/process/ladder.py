"""How long eight trivial children take to start, and to end when one of them fails: ours beside honcho's.

A program for ``scripts/bench ladder``. The same child under both: it says that it is up and waits. Ours is the whole of
``stagelaunch up``: warden, supervisor, a look at two simulated devices, admission, eight workers. Turn by turn, so that
both meet the same machine. With ``--imports torch`` the children import that before they say that they are up.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from deployments import HERE, ROOT, Site, light_stage

CHILDREN = 8
WAIT_S = 60.0
REST_S = 1.5
"""How long after the last child is up both have nothing left to do."""
TRIVIAL = HERE / "trivial"


@dataclass(frozen=True)
class Timing:
    """Seconds: from the start to all children up; from the kill of one to the last child, and to the manager, gone."""

    up_s: float
    children_gone_s: float
    all_gone_s: float


Start = Callable[[Path], subprocess.Popen[bytes]]


def environment(directory: Path, *paths: Path) -> dict[str, str]:
    return {
        **os.environ,
        "LADDER_SOCKET": str(directory / "socket"),
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))),
    }


def start_ours(directory: Path) -> subprocess.Popen[bytes]:
    # As little to import as the child; the margin alone is 150 MiB of the 1 GiB.
    more = {"utilization": 0.2, "engine": "trivial_child:announce"}
    site = Site(directory, [light_stage(i, f"child{i}", i % 2, **more) for i in range(CHILDREN)])
    command = [sys.executable, "-m", "stagelaunch", "up", "--quiet", str(site.write())]
    return _start(command, directory, environment(directory, TRIVIAL, HERE))


def start_honcho(directory: Path) -> subprocess.Popen[bytes]:
    child = f"exec {sys.executable} {TRIVIAL / 'trivial_child.py'}"
    (directory / "Procfile").write_text("".join(f"child{i}: {child}\n" for i in range(CHILDREN)))
    command = [sys.executable, "-m", "honcho", "-f", str(directory / "Procfile"), "start"]
    return _start(command, directory, environment(directory))


def _start(command: list[str], directory: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def measure(start: Start, rest_s: float) -> Timing:
    """One start and one end, so long after it."""
    with tempfile.TemporaryDirectory() as name, closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as told:
        told.bind(f"{name}/socket")
        told.settimeout(WAIT_S)
        began_s = time.monotonic()
        manager = start(Path(name))
        pids = [int(told.recv(64)) for _ in range(CHILDREN)]
        up_s = time.monotonic() - began_s
        pidfds = [os.pidfd_open(pid) for pid in pids]
        try:
            time.sleep(rest_s)
            killed_s = time.monotonic()
            signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
            for pidfd in pidfds:
                assert select.select([pidfd], [], [], WAIT_S)[0], "a child lives on"
            children_gone_s = time.monotonic() - killed_s
            manager.wait(WAIT_S)
            return Timing(up_s, children_gone_s, time.monotonic() - killed_s)
        finally:
            manager.kill()
            manager.wait()
            for pidfd in pidfds:
                os.close(pidfd)


def _row(what: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratio = statistics.median(ours) / statistics.median(theirs)
    spread = "  ".join(f"{min(v):.3f} {statistics.median(v):.3f} {max(v):.3f}" for v in (ours, theirs))
    return f"{what:<34} ratio {ratio:5.2f}   {spread}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ratios and the spread."""
    parser = argparse.ArgumentParser(prog="scripts/bench ladder", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--imports", default="", help="a module that each child imports first")
    args = parser.parse_args(arguments)
    os.environ["LADDER_IMPORTS"] = args.imports
    of = f"{CHILDREN} children that import {args.imports or 'nothing'}"
    print(f"scripts/bench ladder --rounds {args.rounds}: {of}; min median max of ours, then of honcho")
    for rest_s, when in ((0.0, "at once"), (REST_S, "at rest")):
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(measure(start_ours, rest_s))
            theirs.append(measure(start_honcho, rest_s))
        print(_row("start to all up", [t.up_s for t in ours], [t.up_s for t in theirs]))
        for what in ("children", "all"):
            times = [[getattr(t, f"{what}_gone_s") for t in side] for side in (ours, theirs)]
            print(_row(f"one dies {when}, to {what} gone", *times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
