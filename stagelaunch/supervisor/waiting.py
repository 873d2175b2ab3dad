"""Waiting until a deployment fits beside the others: ``up --wait-for-memory``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from stagelaunch.core.errors import AdmissionTimeoutError, DoesNotFitNowError
from stagelaunch.core.memory_wait import MemoryWait, gave_up, hear
from stagelaunch.supervisor.runtime import Runtime

POLL_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long to wait for memory, and who hears of it."""

    wait_s: float
    say: Callable[[str], None]
    runtime: Runtime


async def with_patience(patience: Patience | None, attempt: Callable[[], Awaitable[T]]) -> T:
    """What ``attempt`` returns; it is tried again while it raises DoesNotFitNowError and ``patience`` lasts.

    AdmissionTimeoutError when it is over. Meanwhile the runtime's state is ``waiting``.
    """
    try:
        return await attempt()
    except DoesNotFitNowError as error:
        if patience is None:
            raise
        first = error
    return await _keep_trying(patience, attempt, first)


async def _keep_trying(patience: Patience, attempt: Callable[[], Awaitable[T]], error: DoesNotFitNowError) -> T:
    wait = MemoryWait(patience.wait_s, time.monotonic() + patience.wait_s)
    while True:
        wait, lines = hear(wait, time.monotonic(), error.findings, error.in_the_way)
        if lines:
            _note(patience, "waiting", findings=list(error.findings))
        for line in lines:
            patience.say(line)
        left_s = wait.left_s(time.monotonic())
        if left_s <= 0:
            name = patience.runtime.directory.name
            raise AdmissionTimeoutError(gave_up(wait, name, error.findings))
        await asyncio.sleep(min(POLL_S, left_s))
        try:
            return await attempt()
        except DoesNotFitNowError as again:
            error = again


def _note(patience: Patience, state: str, **more: Any) -> None:
    """The wait goes on, or is over, whether or not that can be written down."""
    with contextlib.suppress(OSError):
        patience.runtime.write_state(state, **more)
