"""How long a boot takes in overlap and in serial order, and what its floor is. A program for ``scripts/bench boot``.

Each time the whole of ``stagelaunch up``: three stages on two simulated devices, one alone, two sharing. What a device
or a disk would take is slept through (``paced_engine``), for as long as the first line says; processes, imports, locks
and measurements are real. Turn by turn, so that both orders meet the same machine. The floor is that of the overlapped
boot, as ``stagelaunch report`` gives it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments import Site, light_stage

PACE = {"read_s": 4.0, "warm_s": 2.0, "batch_s": 0.5, "graph_s": 0.3}
WEIGHTS_MIB = 60
TARGET_OF_FLOOR, TARGET_OF_SERIAL = 1.15, 0.65


def site(directory: Path, order: str) -> Site:
    options = {"weights_mib": str(WEIGHTS_MIB), **{name: str(seconds) for name, seconds in PACE.items()}}
    more: dict[str, Any] = {"engine": "paced_engine:PacedEngine", "options": options, "max_num_seqs": 64}
    stages = [light_stage(i, name, int(i > 0), **more) for i, name in enumerate(("thinker", "talker", "code2wav"))]
    return Site(directory, stages, {"order": order})


def boot(order: str) -> dict[str, Any]:
    """One boot and its end; the report of it."""
    with tempfile.TemporaryDirectory() as name:
        place = site(Path(name), order)
        up = place.run("up", str(place.write()), "--detach", "--wait", "--quiet")
        try:
            assert up.code == 0, up.stderr
            report: dict[str, Any] = json.loads(place.run("report", str(place.config), "--json", "-").stdout)
            return report
        finally:
            place.run("down", str(place.config))


def _row(what: str, ratios: Sequence[float], target: float) -> str:
    middle = statistics.median(ratios)
    verdict = "" if middle <= target else "   MISSED"
    return f"{what:<20} {middle:5.3f}   {min(ratios):.3f} to {max(ratios):.3f}   target {target}{verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ratios and the spread; 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench boot", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verbose", action="store_true", help="print each boot's figures and its critical path")
    args = parser.parse_args(arguments)
    pace = ", ".join(f"{name} {seconds:g}" for name, seconds in PACE.items())
    print(f"scripts/bench boot --rounds {args.rounds}: three stages, two devices; slept: {pace}; reading at")
    print(
        f"{WEIGHTS_MIB / PACE['read_s']:g} MiB/s (simulated); 7 graphs and 3 trial captures a stage; median, min to max"
    )
    of_serial, of_floor = [], []
    for _ in range(args.rounds):
        overlap, serial = boot("overlap"), boot("serial")
        of_serial.append(overlap["boot_s"] / serial["boot_s"])
        of_floor.append(overlap["ratio"])
        if args.verbose:
            print(f"  overlap {overlap['boot_s']:.2f} s, floor {overlap['floor_s']:.2f} s ({overlap['floor_of']}), "
                  f"serial {serial['boot_s']:.2f} s")  # fmt: skip
            for link in overlap["critical_path"]:
                print("   ", link)
    print(_row("overlap / serial", of_serial, TARGET_OF_SERIAL))
    print(_row("overlap / floor", of_floor, TARGET_OF_FLOOR))
    missed = statistics.median(of_serial) > TARGET_OF_SERIAL or statistics.median(of_floor) > TARGET_OF_FLOOR
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
