"""A look at a disk that may never answer, by somebody whom nobody waits for at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Looks:
    """At most one at a time for each ``what``; who asks meanwhile hears what that one finds. Of one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, asyncio.Future[None]] = {}

    async def take(self, what: Hashable, look: Callable[[], None], wait_s: float) -> None:
        """Returns, or raises, as ``look`` does. TimeoutError when it has not by then; it goes on until it can end."""
        found = self._under_way.get(what)
        if found is None:
            found = self._under_way[what] = begin(look)
            found.add_done_callback(lambda done: self._forget(what, done))
        async with asyncio.timeout(wait_s):
            await asyncio.shield(found)

    def _forget(self, what: Hashable, done: asyncio.Future[None]) -> None:
        del self._under_way[what]
        # Also where nobody waits for it any more.
        done.cancelled() or done.exception()


def begin(look: Callable[[], T]) -> asyncio.Future[T]:
    """What ``look`` returns or raises, when it does. In a thread of its own: those of the loop's pool are waited for at
    the end, and others need them."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def tell(result: T) -> None:
        # Whoever waited may have gone.
        if not found.done():
            found.set_result(result)

    def fail(error: Exception) -> None:
        if not found.done():
            found.set_exception(error)

    def work() -> None:
        # A loop that is closed: nobody is there any more who would hear it.
        with suppress(RuntimeError):
            try:
                result = look()
            except Exception as error:
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=work, name="look", daemon=True).start()
    return found
