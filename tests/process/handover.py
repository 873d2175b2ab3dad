"""From letting go of a device lock in one process to being inside in another that waits: ours beside a plain flock.

A program for ``scripts/bench handover``. Turn by turn, so that both meet the same machine. Ours is fair, has a
deadline, names its holders and survives a replaced file; the plain one blocks in the kernel and does none of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
READERS, HOLD_S, STARVED_HOLDS = 3, 0.05, 20.0


class Child:
    """A process that takes locks on command."""

    def __init__(self, *command: str | Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # What is read is all that is there: select() tells whether there is more.
            bufsize=0,
        )
        self.expect("up")

    def tell(self, *command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def expect(self, name: str) -> list[Any]:
        """What the next event of this name says; others before it are passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event: list[Any] = json.loads(line)
            if event[0] == name:
                return event[1:]
        raise AssertionError(f"a child ended before it was {name}")

    def wait_for_words(self, timeout_s: float) -> bool:
        """Whether it says something within so long."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], timeout_s)[0])

    def hold(self, mode: str) -> None:
        self.tell("hold", mode, "bench", 60.0)

    def release(self) -> float:
        """When it began to let go."""
        self.tell("release")
        return float(self.expect("released")[0])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


Start = Callable[[], Child]


def hand_over(holders: Sequence[Child], first: str, waiter: Child, second: str) -> float:
    """Seconds from the last holder's letting go to the waiter's being inside."""
    for holder in holders:
        holder.hold(first)
        holder.expect("held")
    waiter.hold(second)
    waiter.expect("waiting")
    # It has waited for a while, and not always for the same part of its rhythm.
    time.sleep(random.uniform(0.03, 0.05))
    left_s = [holder.release() for holder in holders][-1]
    entered_s = float(waiter.expect("held")[0])
    waiter.release()
    return entered_s - left_s


def writer_wait(readers: Sequence[Child], writer: Child) -> float:
    """How many holds a writer waits for readers that overlap and take the lock again at once."""
    for place, reader in enumerate(readers):
        reader.tell("loop", HOLD_S * (place + 1) / len(readers), HOLD_S)
    for reader in readers:
        reader.expect("cycle")
        reader.expect("cycle")
    began_s = time.monotonic()
    writer.hold("exclusive")
    writer.expect("waiting")
    got_in = writer.wait_for_words(STARVED_HOLDS * HOLD_S)
    if got_in:
        entered_s = float(writer.expect("held")[0])
        writer.release()
    for reader in readers:
        reader.tell("stop")
    for reader in readers:
        reader.expect("stopped")
    if not got_in:
        entered_s = float(writer.expect("held")[0])
        writer.release()
    return (entered_s - began_s) / HOLD_S


CASES = (
    ("exclusive to exclusive", 1, "exclusive", "exclusive"),
    ("exclusive to shared", 1, "exclusive", "shared"),
    ("three readers to exclusive", READERS, "shared", "exclusive"),
)


def _like_the_default() -> str | None:
    """Where lock files lie by default: in memory. On a disk every record that goes costs a part of a millisecond."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _row(what: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratio = statistics.median(ours) / statistics.median(theirs)
    spread = "  ".join(
        f"{min(v) * 1e3:.2f} {statistics.median(v) * 1e3:.2f} {max(v) * 1e3:.2f}" for v in (ours, theirs)
    )
    return f"{what:<28} ratio {ratio:5.2f}   {spread}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ratios and the spread."""
    parser = argparse.ArgumentParser(prog="scripts/bench handover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=_like_the_default()) as name, ExitStack() as children:

        def start(*command: str | Path) -> list[Child]:
            made = [Child(*command) for _ in range(READERS + 1)]
            for child in made:
                children.callback(child.close)
            return made

        kinds = (start(HERE / "lock_child.py", name, "GPU-0", "bench"), start(HERE / "flock_child.py", f"{name}/plain"))
        print(f"scripts/bench handover --rounds {args.rounds}; ms, min median max of ours, then of a plain flock")
        for what, count, first, second in CASES:
            took: tuple[list[float], list[float]] = ([], [])
            for _ in range(args.rounds):
                for (waiter, *others), times in zip(kinds, took):
                    times.append(hand_over(others[:count], first, waiter, second))
            print(_row(what, *took))
        waits: tuple[list[float], list[float]] = ([], [])
        for _ in range(max(1, args.rounds // 5)):
            for (writer, *readers), holds in zip(kinds, waits):
                holds.append(writer_wait(readers, writer))
        shown = [f"{min(v):.2f} {statistics.median(v):.2f} {max(v):.2f}" for v in waits]
        print(
            f"{READERS} readers that overlap and take it again at once, a writer's wait in holds of "
            f"{HOLD_S * 1e3:.0f} ms: {shown[0]}; plain {shown[1]} (ended after {STARVED_HOLDS:.0f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
