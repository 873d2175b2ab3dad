"""Keeps what a running deployment is found by: its runtime directory, its lock in there, and its control socket.

Somebody who deletes or replaces them (a tidy-up of /run, an operator) takes nothing away: they are made again within
a second. `supervisor.run` owns a ``Keeper`` for a run. Not the refusal of a second start in that second: that is the
claim in the lock directory (`supervisor.admission`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from filelock import FileLock

from stagelaunch.core.errors import StagelaunchError
from stagelaunch.supervisor.control_socket import ControlSocket
from stagelaunch.supervisor.runtime import Runtime

LOOK_EVERY_S = 1.0


class Keeper:
    """``lock`` is the held lock of the runtime. ``restore`` writes what else belongs into a new directory."""

    def __init__(
        self,
        runtime: Runtime,
        lock: FileLock,
        endpoint: ControlSocket,
        say: Callable[[str], None],
        restore: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._lock = lock
        self._endpoint = endpoint
        self._say = say
        self._restore = restore
        self._held = _identity(runtime)
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look every second until ``close``."""
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def look(self) -> None:
        """Make again what is gone. What cannot be made is said, once, and tried again at the next look."""
        where = self._runtime.directory
        try:
            if self._held is None or _identity(self._runtime) != self._held:
                self._take_back()
                self._say(f"{where} or its lock file was deleted or replaced: made again")
            if not await self._endpoint.look():
                self._say(f"{self._runtime.socket} was deleted or replaced: made again")
            self._trouble = ""
        except (StagelaunchError, OSError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._say(f"cannot keep {where}: {error}")

    def _take_back(self) -> None:
        self._runtime.create()
        self._runtime.claim(self._lock)
        self._held = _identity(self._runtime)
        self._restore()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()


def _identity(runtime: Runtime) -> tuple[int, int] | None:
    """Of the lock file that the path names now."""
    try:
        status = os.stat(runtime.lock)
    except OSError:
        return None
    return status.st_dev, status.st_ino
