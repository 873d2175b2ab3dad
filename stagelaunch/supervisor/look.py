"""A look at a disk that may never answer, by somebody whom nobody waits for. Used by ``supervisor.session``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress


class Looks:
    """At most one at a time for each ``what``; who asks meanwhile hears what that one finds. Of one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, asyncio.Future[None]] = {}

    async def take(self, what: Hashable, look: Callable[[], None], wait_s: float) -> None:
        """Returns, or raises, as ``look`` does. TimeoutError when it has not by then; it goes on until it can end.

        In a thread of its own: those of the loop's pool are waited for at the end, and others need them.
        """
        found = self._under_way.get(what)
        if found is None:
            found = self._under_way[what] = self._begin(look)
            found.add_done_callback(lambda done: self._forget(what, done))
        async with asyncio.timeout(wait_s):
            await asyncio.shield(found)

    def _begin(self, look: Callable[[], None]) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[None] = loop.create_future()

        def work() -> None:
            error = None
            try:
                look()
            except Exception as caught:
                error = caught
            # A loop that is closed: nobody is there any more who would hear it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_tell, found, error)

        threading.Thread(target=work, name="look", daemon=True).start()
        return found

    def _forget(self, what: Hashable, done: asyncio.Future[None]) -> None:
        del self._under_way[what]
        # Also where nobody waits for it any more.
        done.cancelled() or done.exception()


def _tell(found: asyncio.Future[None], error: Exception | None) -> None:
    if error is None:
        found.set_result(None)
    else:
        found.set_exception(error)
