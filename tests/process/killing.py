"""Kills a part of a booting deployment at a random instant, and measures how long until nothing of it is left.

Three stages (``light_engine``) under the real ``stagelaunch up``; each round kills the supervisor, a stage's leader,
the warden, or warden and supervisor at once. A third of the instants lie in the first 300 ms, the others anywhere in
the boot; it begins when the supervisor begins to have its stages forked, for a stage when the stages run. Who is gone
is told by pidfds; who was missed, by the run id. For ``scripts/soak``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deployments import PID, ROOT, TIMEOUT_S, Site

from stagelaunch.system import cgroup, tree

TARGETS = ("supervisor", "stage", "warden", "both")
EARLY_S = 0.3
WAIT_S = 20.0


@dataclass(frozen=True)
class Round:
    """What one kill has come to; times from the kill on."""

    target: str
    instant_s: float
    """After the boot began."""
    stages_gone_s: float | None
    """The last of the stages and what they had started; None where there was no stage yet."""
    all_gone_s: float
    survivors: tuple[str, ...]
    held_bytes: int
    """Of simulated device memory, when all were gone."""

    def __str__(self) -> str:
        left = f", LEFT: {'; '.join(self.survivors)}" if self.survivors else ""
        held = f", {self.held_bytes} bytes still held" if self.held_bytes else ""
        stages = (
            "no stage yet" if self.stages_gone_s is None else f"stages gone after {self.stages_gone_s * 1000:6.1f} ms"
        )
        return (
            f"{self.target:<10} killed at {self.instant_s:5.3f} s: {stages}, all after {self.all_gone_s * 1000:6.1f} ms"
            f"{left}{held}"
        )


class Booting:
    """A deployment that has just started its stages."""

    def __init__(self, site: Site, target: str) -> None:
        self.site = site
        told, tell = os.pipe()
        command = [sys.executable, "-m", "stagelaunch", "up", "--notify-fd", str(tell), str(site.write())]
        self.up = subprocess.Popen(
            command, cwd=ROOT, env=site.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            pass_fds=[tell],
        )  # fmt: skip
        os.close(tell)
        self.stages: list[int] = []
        with os.fdopen(told) as events:
            while "started" not in json.loads(events.readline()):
                continue
        self.started_s = time.monotonic()
        if target == "stage":
            self._listen_until_started(len(site.stages))
            self.started_s = time.monotonic()
        self.supervisor: int = site.state()["pid"]
        self.run_id: str = site.state()["run_id"]
        # Read to the end, so that nobody waits for a full pipe.
        threading.Thread(target=self._drain, daemon=True).start()

    def _listen_until_started(self, stages: int) -> None:
        assert self.up.stderr is not None
        for line in self.up.stderr:
            if "): started on device" in line:
                self.stages += map(int, PID.findall(line))
            if len(self.stages) == stages:
                return
        raise AssertionError("the stages were never started")

    def _drain(self) -> None:
        assert self.up.stderr is not None
        with self.up.stderr as lines:
            for _ in lines:
                continue

    def wait_until_ready(self) -> float:
        """How long the boot took, in seconds."""
        assert self.up.stdout is not None
        assert "ready" in self.up.stdout.readline()
        return time.monotonic() - self.started_s

    def victims(self, target: str, dice: random.Random) -> list[int]:
        match target:
            case "supervisor":
                return [self.supervisor]
            case "stage":
                return [dice.choice(self.stages)]
            case "warden":
                return [self.up.pid]
            case _:
                return [self.up.pid, self.supervisor]

    def kill(self, target: str, instant_s: float, dice: random.Random) -> Round:
        """Kill at that instant, and watch until all are gone."""
        victims = [os.pidfd_open(pid) for pid in self.victims(target, dice)]
        threading.Event().wait(max(0.0, self.started_s + instant_s - time.monotonic()))
        table = tree.read_table()
        known = [table[self.up.pid], *tree.descendants(table, self.up.pid)]
        pidfds = {fd: process.pid for process in known if (fd := tree.open_process(process)) is not None}
        killed_s = time.monotonic()
        for fd in victims:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        gone_s = self._watch(pidfds, killed_s)
        survivors = tuple(map(tree.describe, tree.find_run(self.run_id)))
        # What the supervisor has started itself, the forkserver above all, ends with it.
        own = {process.pid for process in known if process.parent in (self.up.pid, self.supervisor)} | {self.up.pid}
        stages = [took_s for pid, took_s in gone_s.items() if pid not in own]
        for fd in (*victims, *pidfds):
            os.close(fd)
        self.close()
        held = sum(info.total_bytes - info.free_bytes for info in self.site.devices().values())
        stages_s = max(stages, default=None)
        return Round(target, killed_s - self.started_s, stages_s, max(gone_s.values()), survivors, held)

    def _watch(self, pidfds: dict[int, int], killed_s: float) -> dict[int, float]:
        """When each of these was gone, by pid; infinite for one that is still there."""
        waited, gone = dict(pidfds), dict.fromkeys(pidfds.values(), float("inf"))
        poll = select.poll()
        for fd in waited:
            poll.register(fd, select.POLLIN)
        while waited and (left_s := killed_s + WAIT_S - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                poll.unregister(fd)
                gone[waited.pop(fd)] = time.monotonic() - killed_s
        return gone

    def close(self) -> None:
        """End whatever is left of it."""
        place = self.site.state().get("cgroup")
        self.up.kill()
        tree.sweep(lambda table: tree.find_run(self.run_id, table), WAIT_S)
        if place is not None:
            cgroup.remove(Path(place), WAIT_S)
        self.up.wait(TIMEOUT_S)
        assert self.up.stdout is not None
        self.up.stdout.close()


def boot_time_s(directory: Path) -> float:
    """How long an undisturbed boot takes here."""
    booting = Booting(site_at(directory, "whole"), "")
    try:
        return booting.wait_until_ready()
    finally:
        booting.close()


def site_at(directory: Path, name: str) -> Site:
    place = directory / name
    place.mkdir()
    return Site(place)


def run_many(directory: Path, rounds: int, seed: int, targets: Sequence[str] = TARGETS) -> list[Round]:
    """So many kills, the targets in turn."""
    boot_s, done = boot_time_s(directory), []
    for number in range(rounds):
        dice = random.Random(seed + number)
        early = (number // len(targets)) % 3 == 0
        instant_s = dice.uniform(0, EARLY_S if early else boot_s)
        target = targets[number % len(targets)]
        done.append(Booting(site_at(directory, f"round-{number}"), target).kill(target, instant_s, dice))
    return done


def summary(rounds: Sequence[Round]) -> str:
    """One line per target."""
    lines = [f"{'killed':<10} rounds  last gone: median     p95      max  stages gone: median     p95  survivors"]
    for target in dict.fromkeys(each.target for each in rounds):
        own = [each for each in rounds if each.target == target]
        all_ms = sorted(each.all_gone_s * 1000 for each in own)
        stages_ms = sorted(each.stages_gone_s * 1000 for each in own if each.stages_gone_s is not None) or [0.0]
        left = sum(len(each.survivors) for each in own)
        lines.append(
            f"{target:<10} {len(own):6}        {_quantile(all_ms, 0.5):7.1f} {_quantile(all_ms, 0.95):7.1f} "
            f"{all_ms[-1]:8.1f}          {_quantile(stages_ms, 0.5):8.1f} {_quantile(stages_ms, 0.95):7.1f}  {left:9}"
        )
    return "\n".join(lines)


def _quantile(values: Sequence[float], share: float) -> float:
    return values[int(share * len(values))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak killing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="kills in all (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next ones count up")
    parser.add_argument("--only", choices=TARGETS, help="kill this only")
    parser.add_argument("--verbose", action="store_true", help="print every round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rounds = run_many(Path(directory), args.rounds, args.seed, [args.only] if args.only else TARGETS)
    if args.verbose:
        print(*rounds, sep="\n")
    print(summary(rounds))
    failed = [each for each in rounds if each.survivors or each.held_bytes]
    for each in failed:
        print(each)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
