"""A supervisor that goes no further than its claim: admits a deployment as its standard input tells it.

usage: admission_child.py CONFIG [window] [no_mutex]
``admit`` answers ``admitted`` (then ``release`` is awaited), ``refused TEXT`` or ``timeout TEXT``. ``kill`` dies while
admitted; ``kill forked`` leaves a forked child that keeps every descriptor, and says its pid. With ``window`` it says
``window`` between the decision and the claim, and waits for a line.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from stagelaunch.config_file import load_deployment
from stagelaunch.core.errors import DoesNotFitNowError, LockTimeoutError
from stagelaunch.supervisor import admission
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.system.locks import LockDirectory


def say(*words: object) -> None:
    print(*words, flush=True)


def heard() -> str:
    return sys.stdin.readline().strip()


def open_window() -> None:
    hold_claims = admission.hold_claims

    def slow(*arguments: Any) -> AbstractContextManager[None]:
        say("window")
        heard()
        return hold_claims(*arguments)

    admission.hold_claims = slow  # type: ignore[assignment]


def remove_mutex() -> None:
    @asynccontextmanager
    async def nobody_else(*_: object) -> AsyncIterator[None]:
        yield

    admission.admission_mutex = nobody_else


def die(forked: bool) -> None:
    # PyDLL: no after-fork hooks of Python's run, as when a C library forks.
    if forked:
        pid = ctypes.PyDLL(None).fork()
        if pid == 0:
            signal.pause()
        say(pid)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    config, *options = sys.argv[1:]
    loaded = load_deployment(config)
    machine = loaded.machine(Path("/nonexistent"))
    runtime = Runtime.of(loaded.deployment.name, loaded.runtime_dir)
    if "window" in options:
        open_window()
    if "no_mutex" in options:
        remove_mutex()
    lock_dir = LockDirectory(loaded.lock_dir)
    say("up")
    while heard() == "admit":
        with ExitStack() as held:
            try:
                asyncio.run(admission.admit(loaded, machine, runtime, lock_dir, held))
            except (DoesNotFitNowError, LockTimeoutError) as error:
                say("timeout" if isinstance(error, LockTimeoutError) else "refused", str(error).replace("\n", " "))
                continue
            say("admitted")
            if (command := heard()).startswith("kill"):
                die("forked" in command)
        say("released")


if __name__ == "__main__":
    main()
