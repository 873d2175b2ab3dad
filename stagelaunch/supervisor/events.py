"""Keeps what has happened (`core.events`) since the run began, for whoever follows it over the control socket."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from stagelaunch.core.events import Event, EventKind, News

CAPACITY = 10_000
"""Events kept; the oldest go first."""


class EventLog:
    """The events of one run. Of one event loop; ``add`` never waits, also not for a follower that is slow."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._kept: deque[Event] = deque(maxlen=capacity)
        self._began_s = time.monotonic()
        self._next_seq = 1
        self._changed = asyncio.Event()
        self._is_closed = False

    def add(self, news: News) -> None:
        """It happened now."""
        self._kept.append(Event(self._next_seq, time.time(), time.monotonic() - self._began_s, news))
        self._next_seq += 1
        self._wake()

    def close(self) -> None:
        """Nothing will happen any more: followers end when they have heard everything."""
        self._is_closed = True
        self._wake()

    async def follow(self, *, wait: bool = True) -> AsyncGenerator[dict[str, Any], None]:
        """Every event from the first on, as JSON; with ``wait`` also those to come, until the log is closed.

        Where events are not kept any more, one of kind ``lost`` with their ``count`` stands for them.
        """
        seq = 1
        while True:
            changed = self._changed
            first = self._kept[0].seq if self._kept else self._next_seq
            if seq < first:
                yield {"event": EventKind.LOST, "count": first - seq}
                seq = first
            elif seq < self._next_seq:
                yield self._kept[seq - first].to_json()
                seq += 1
            elif self._is_closed or not wait:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
