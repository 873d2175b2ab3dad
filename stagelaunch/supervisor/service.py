"""Keeps a service manager informed about a deployment: that it boots, gets on, is ready, reloads, stops, and lives.

Runs on the supervisor's asyncio loop and nowhere else, so that a loop that is stuck falls silent and the manager's
watchdog sees it. Does nothing where no manager listens. ``supervisor.run`` calls it; ``core.service_status`` decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum

from stagelaunch.core.config import Timeouts
from stagelaunch.core.service_status import (
    Views,
    booting_text,
    one_line,
    progress_of,
    quiet_bound_s,
    ready_text,
    stop_bound_s,
    waits_for_others,
)
from stagelaunch.supervisor.notify import NotifySocket

TICK_S = 1.0


class _State(StrEnum):
    STARTING = "starting"
    BOOTING = "booting"
    READY = "ready"
    RELOADING = "reloading"
    STOPPING = "stopping"


class ServiceNotifier:
    """Tells a service manager how a deployment is. Never blocks, never raises."""

    def __init__(self, manager: NotifySocket, watchdog_s: float | None, timeouts: Timeouts) -> None:
        self._manager = manager
        self._timeouts = timeouts
        self._watchdog_s = watchdog_s
        self._state = _State.STARTING
        self._views: Callable[[], Views] = dict
        self._why_stopping: Callable[[], str | None] = _not
        self._progress = progress_of({})
        self._status = ""
        self._owed: tuple[str, ...] = ()
        """What the manager must learn and has not taken yet."""
        self._ready_sent = False
        self._task: asyncio.Task[None] | None = None

    def admitting(self, wait_s: float = 0.0) -> None:
        """Devices are looked at, budgets worked out; memory may be waited for as long as ``wait_s``.

        From now on the loop shows that it lives.
        """
        self._tell(f"EXTEND_TIMEOUT_USEC={_usec(wait_s + quiet_bound_s(self._timeouts))}")
        self._say_status("waiting for its admission" if wait_s else "looking at devices and budgets")
        if self._manager.address is not None and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._beat())

    def booting(self, views: Callable[[], Views], why_stopping: Callable[[], str | None]) -> None:
        """Stages are being started; ``views`` tells how far they are, ``why_stopping`` whether all that is over.

        Both are asked on every tick.
        """
        self._views, self._why_stopping, self._state = views, why_stopping, _State.BOOTING
        self.tick()

    def ready(self) -> None:
        """Every stage is ready, for the first time or again: READY=1 goes out once for each."""
        if self._state is _State.STOPPING:
            return
        self._state = _State.READY
        self._status = ready_text(self._views())
        if self._ready_sent:
            self._tell(f"STATUS={self._status}")
        else:
            self._ready_sent = True
            self._must_tell("READY=1", f"STATUS={self._status}")

    def reloading(self) -> None:
        """The config file is read again; ``reloaded`` ends it."""
        if self._state is _State.READY:
            self._state = _State.RELOADING
            self._must_tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading")

    def reloaded(self, timeouts: Timeouts) -> None:
        """What could be taken over was; ``timeouts`` are those from now on."""
        self._timeouts = timeouts
        if self._state is _State.RELOADING:
            self._state = _State.READY
            self._must_tell("READY=1", f"STATUS={self._status}")

    def stopping(self, why: str) -> None:
        """It stops because of ``why``. The manager hears once how long our own ladder may take, and never more."""
        if self._state is _State.STOPPING:
            return
        self._state = _State.STOPPING
        self._status = one_line(f"stopping: {why}")
        extend = _usec(stop_bound_s(self._timeouts))
        self._must_tell("STOPPING=1", f"STATUS={self._status}", f"EXTEND_TIMEOUT_USEC={extend}")

    def close(self) -> None:
        """The end: nothing is sent any more."""
        if self._task is not None:
            self._task.cancel()
        self._manager.close()

    def tick(self) -> None:
        """What is owed, then how the boot gets on: more time only if it does."""
        if self._owed and self._manager.send(*self._owed):
            self._owed = ()
        why = self._why_stopping()
        if why is not None:
            self.stopping(why)
        if self._state is not _State.BOOTING:
            return
        views, now_s = self._views(), time.monotonic()
        before, self._progress = self._progress, progress_of(views)
        gets_on = before != self._progress or waits_for_others(views, self._timeouts.lock_s, now_s)
        # Once the manager has seen READY=1, more time would only put its watchdog off.
        if gets_on and not self._ready_sent:
            self._tell(f"EXTEND_TIMEOUT_USEC={_usec(quiet_bound_s(self._timeouts))}")
        self._say_status(booting_text(views, now_s))

    async def _beat(self) -> None:
        """Ticks, and shows at a third of the watchdog's time that the loop runs."""
        every_s = TICK_S if self._watchdog_s is None else min(TICK_S, self._watchdog_s / 3)
        alive_at_s = 0.0
        while True:
            if self._watchdog_s is not None and time.monotonic() - alive_at_s >= self._watchdog_s / 3 - every_s / 2:
                alive_at_s = time.monotonic()
                self._tell("WATCHDOG=1")
            self.tick()
            await asyncio.sleep(every_s)

    def _say_status(self, text: str) -> None:
        text = one_line(text)
        if text != self._status:
            self._status = text
            self._tell(f"STATUS={self._status}")

    def _tell(self, *lines: str) -> None:
        self._manager.send(*lines)

    def _must_tell(self, *lines: str) -> None:
        """The latest of these is sent until it is taken: without it the manager would wait, and kill."""
        self._owed = () if self._manager.send(*lines) else lines


def _not() -> None:
    return None


def _usec(duration_s: float) -> int:
    return round(duration_s * 1e6)
