"""A supervisor without any library, for tests of the real warden: starts a child of each kind named, then does as told.

usage: kin.py --run-id ID [--cgroup DIR] KIND,KIND,... THEN
Says ``KIND PID`` for each child, ``ready`` when all are there, ``got SIGNAL`` for each signal. THEN is ``exit N``,
``until SIGNAL``, or ``zombies``: let orphans end, tell how many of them stay, poke the parent with SIGTERM, and end
with that. No child here dies of SIGTERM. With a cgroup each child goes into one below it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
CHAIN_LENGTH = 20_000


def say(text: str) -> None:
    """Atomic: children say something too."""
    os.write(1, f"{text}\n".encode())


def live() -> NoReturn:
    """Until killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def child(kind: str) -> NoReturn:
    """Be one child of that kind, in a process of its own. Says so when it is what it is to be."""
    match kind:
        case "plain" | "stopped" | "thread":
            pass
        case "session":
            os.setsid()
        case "double":
            leave_orphan()
        case "exec":
            code = "import os, signal; os.setsid(); signal.signal(15, 1); print('exec', os.getpid(), flush=True)"
            os.execv(sys.executable, [sys.executable, "-S", "-c", f"{code}; signal.pause()"])
        case "titled":
            os.setsid()
            rename()
        case "chain":
            forge_a_chain()
        case _:
            raise AssertionError(kind)
    say(f"{kind} {os.getpid()}")
    match kind:
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "thread":
            # The leader ends, and looks like a zombie; the thread lives.
            threading.Thread(target=threading.Event().wait).start()
            ctypes.CDLL(None).pthread_exit(None)
    live()


def leave_orphan() -> None:
    """Double fork, and a session of its own: this process is nobody's child when this returns."""
    os.setsid()
    if os.fork():
        os._exit(0)


def rename() -> None:
    """Another name, another command line, and no environment: all that was on the stack at the start is overwritten."""
    ctypes.CDLL(None).prctl(15, b"innocent", 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    arguments_begin, environment_end = int(fields[45]), int(fields[48])
    ctypes.memset(arguments_begin, 0, environment_end - arguments_begin)


def forge_a_chain() -> NoReturn:
    """A process that forks and ends, and so does its child, and so on: none lives for longer than a moment."""
    os.setsid()
    say(f"chain {os.getpid()}")
    for _ in range(CHAIN_LENGTH):
        if os.fork():
            os._exit(0)
    say("chain ended")
    os._exit(0)


def enter(cgroup: str | None) -> None:
    if cgroup is not None:
        place = Path(cgroup) / "stage-kin"
        place.mkdir(exist_ok=True)
        (place / "cgroup.procs").write_text("0")


def start(kind: str, cgroup: str | None) -> int:
    """A child of that kind, once it is what it is to be; its pid, as it says itself."""
    heard, told = os.pipe()
    if os.fork() == 0:
        os.dup2(told, 1)
        try:
            enter(cgroup)
            child(kind)
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(heard) as said:
        return int(said.readline().split()[1])


def count_zombies(orphans: int = 20, patience_s: float = 5.0) -> int:
    """How many of so many orphans that ended stay in the process table."""
    alive, held = os.pipe()
    for _ in range(orphans):
        if (pid := os.fork()) == 0:
            os.fork()
            os._exit(0)
        os.waitpid(pid, 0)
    os.close(held)
    os.read(alive, 1)
    deadline_s = time.monotonic() + patience_s
    while (zombies := sum(map(is_zombie, Path("/proc").glob("[0-9]*/stat")))) and time.monotonic() < deadline_s:
        os.sched_yield()
    return zombies


def is_zombie(stat: Path) -> bool:
    try:
        return stat.read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--run-id", "--cgroup"):
        parser.add_argument(name)
    parser.add_argument("kinds")
    parser.add_argument("then")
    args = parser.parse_args()
    got = os.pipe()
    os.set_blocking(got[1], False)
    signal.set_wakeup_fd(got[1])
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    say(f"supervisor {os.getpid()}")
    say(f"run {args.run_id}")
    say(f"cgroup {args.cgroup}")
    for kind in filter(None, args.kinds.split(",")):
        if kind == "tracker":
            # Starts multiprocessing's resource tracker, which removes this when we die without having done so.
            block = shared_memory.SharedMemory(create=True, size=16)
            say(f"tracker {block.name}")
        elif kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            say(f"{kind} {start(kind, args.cgroup)}")
    say("ready")
    what, _, last = args.then.partition(" ")
    if what == "exit":
        os._exit(int(last))
    if what == "zombies":
        say(f"zombies {count_zombies()}")
        os.kill(os.getppid(), signal.SIGTERM)
        last = "SIGTERM"
    while True:
        name = signal.Signals(os.read(got[0], 1)[0]).name
        say(f"got {name}")
        if name == last:
            os._exit(0)


if __name__ == "__main__":
    main()
