"""A process that takes one plain, blocking flock as its standard input tells it: what ``handover`` puts ours beside.

usage: flock_child.py FILE. Speaks as ``lock_child`` does, as far as ``handover`` needs it: ``hold``, ``loop``,
``release`` and ``stop``.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def say(*event: Any) -> None:
    print(json.dumps(event), flush=True)


@contextmanager
def locked(path: str, operation: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, operation)
        yield
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def main() -> None:
    path = sys.argv[1]
    say("up")
    for line in sys.stdin:
        match json.loads(line):
            case ["hold", mode, *_]:
                say("waiting")
                with locked(path, fcntl.LOCK_EX if mode == "exclusive" else fcntl.LOCK_SH):
                    say("held", time.monotonic())
                    sys.stdin.readline()
                    left_s = time.monotonic()
                say("released", left_s)
            case ["loop", hold_s, next_hold_s]:
                stopped = False
                while not stopped:
                    with locked(path, fcntl.LOCK_SH):
                        say("cycle")
                        stopped = bool(select.select([sys.stdin], [], [], hold_s)[0])
                    hold_s = next_hold_s
                sys.stdin.readline()
                say("stopped")


if __name__ == "__main__":
    main()
