"""SIGQUIT to the supervisor: the stacks of its threads, in a file, also where its loop hangs."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO

STACK_LINES = 200
"""How many lines of that file are said."""

_stacks: list[IO[str]] = []
"""The file that SIGQUIT writes to; faulthandler keeps only its descriptor."""


def dump_threads_on_quit(path: Path, then: Callable[[], None] = lambda: None) -> None:
    """SIGQUIT writes the stack of this thread to ``path``, from C: also where a loop hangs that runs no handler. Then,
    on the loop, those of all threads, and ``then`` is called.

    Not all of them from C, where the frames of threads that run are read: that can crash. Not to stderr, which may be a
    pipe that nobody reads. To be called from the loop's thread.
    """

    def dump() -> None:
        if _stacks:
            faulthandler.dump_traceback(_stacks[0], all_threads=True)
        then()

    loop = asyncio.get_running_loop()

    def on_quit(*_: object) -> None:
        # A loop that is closed has its last words said by others.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(dump)

    # Taken back first: registered twice, the second time would change nothing.
    faulthandler.unregister(signal.SIGQUIT)
    # Not as a handler of the loop, which is taken back with it: the signal would kill who says how it ended.
    signal.signal(signal.SIGQUIT, on_quit)
    with contextlib.suppress(OSError):
        # A FIFO there would wait for a reader.
        new = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o644), "w")
        while _stacks:
            _stacks.pop().close()
        _stacks.append(new)
    if _stacks:
        faulthandler.register(signal.SIGQUIT, file=_stacks[0], all_threads=False, chain=True)
