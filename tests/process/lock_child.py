"""A process that takes device locks as its standard input tells it and says what happened on standard output.

usage: lock_child.py DIRECTORY UUID[,UUID...] OWNER [ungated] [umask] [nobody]
One JSON list per line, both ways; its first item is the command or the event. Ends at end of file on its input.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from stagelaunch.core.errors import LockTimeoutError
from stagelaunch.core.phases import LockMode
from stagelaunch.system import locks


def say(*event: Any) -> None:
    print(json.dumps(event), flush=True)


def heard() -> list[Any]:
    line = sys.stdin.readline()
    return json.loads(line) if line else ["end"]


def hold(device_locks: locks.DeviceLocks, mode: str, phase: str, timeout_s: float) -> None:
    """Hold until told ``release``; while holding, ``fork``, ``libc_fork`` and ``fork_and_leave`` are understood."""
    parent = os.getpid()
    try:
        with device_locks.hold(
            LockMode(mode),
            phase=phase,
            timeout_s=timeout_s,
            on_wait=lambda found: say("waiting", [str(h) for h in found]),
        ):
            say("held", time.monotonic())
            while (command := heard()[0]) not in ("release", "end"):
                if fork(command) == 0:
                    return  # a child that leaves the block like any other code
            left_s = time.monotonic()
        say("released", left_s)
    except LockTimeoutError as error:
        say("timeout", str(error))
    except KeyboardInterrupt:
        say("interrupted")
    finally:
        if os.getpid() != parent:
            os._exit(0)


def fork(command: str) -> int:
    """Fork a child that lives as long as the test does, or, for ``fork_and_leave``, returns 0 in the child."""
    # PyDLL keeps the GIL; this fork does not run Python's after-fork hooks, as a C library's would not.
    pid = int(ctypes.PyDLL(None).fork()) if command == "libc_fork" else os.fork()
    if pid == 0:
        if command == "fork_and_leave":
            return 0
        live_until_hang_up()
    if command == "fork_and_leave":
        os.waitpid(pid, 0)
    say("forked", pid)
    return pid


def live_until_hang_up() -> NoReturn:
    """Wait, without reading, until the test closes its end of standard input; the parent may be dead by then."""
    poll = select.poll()
    poll.register(sys.stdin, 0)
    poll.poll()
    os._exit(0)


def loop(device_locks: locks.DeviceLocks, first_hold_s: float, hold_s: float) -> None:
    """Take the lock shared again and again until told to stop, hanging on to it for a time."""
    stopped, next_hold_s = False, first_hold_s
    while not stopped:
        with device_locks.hold(LockMode.SHARED, phase="read", timeout_s=30):
            say("cycle")
            stopped = bool(select.select([sys.stdin], [], [], next_hold_s)[0])
        next_hold_s = hold_s
    heard()
    say("stopped")


def rounds(directory: locks.LockDirectory, uuids: list[str], slot: int, count: int, timeout_s: float) -> None:
    """Take all devices ``count`` times, in any order and mode; watch in a shared page that nobody else may see us."""
    dice = random.Random(slot)
    violations = 0
    with (Path(directory) / "page").open("r+b") as file, mmap.mmap(file.fileno(), 64) as page:
        for _ in range(count):
            mode = dice.choice([LockMode.SHARED, LockMode.EXCLUSIVE])
            chosen = dice.sample(uuids, len(uuids))
            with locks.DeviceLocks(directory, chosen, owner=f"p{slot}").hold(mode, phase="round", timeout_s=timeout_s):
                page[slot] = 2 if mode is LockMode.EXCLUSIVE else 1
                for _ in range(3):
                    os.sched_yield()
                    others = [page[i] for i in range(8) if i != slot]
                    violations += max(others) == 2 or (mode is LockMode.EXCLUSIVE and max(others) > 0)
                page[slot] = 0
    say("rounds", violations)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path, uuids, owner, *rest = sys.argv[1:]
    if "umask" in rest:
        os.umask(0o077)
    if "ungated" in rest:
        # A gate of one's own stops nobody: the lock without its gate.
        locks.gate_path = lambda directory, uuid: directory / f"{uuid}.gate.{os.getpid()}"
    if "nobody" in rest:
        # After the imports: the interpreter itself may lie where only root can read.
        os.setgid(65534)
        os.setuid(65534)
    directory = locks.LockDirectory(path)
    device_locks = locks.DeviceLocks(directory, uuids.split(","), owner=owner)
    say("up")
    while (command := heard())[0] != "end":
        match command:
            case ["hold", mode, phase, timeout_s]:
                hold(device_locks, mode, phase, timeout_s)
            case ["loop", first_hold_s, hold_s]:
                loop(device_locks, first_hold_s, hold_s)
            case ["rounds", slot, count, timeout_s]:
                rounds(directory, uuids.split(","), slot, count, timeout_s)


if __name__ == "__main__":
    main()
