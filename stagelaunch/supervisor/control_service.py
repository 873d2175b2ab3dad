"""A run's control socket from bind to close: listens at once, answers as soon as the HTTP library is imported.

Used by ``session``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from stagelaunch.supervisor.control_socket import ControlSocket, Handlers
from stagelaunch.supervisor.keeper import Keeper
from stagelaunch.supervisor.runtime import Runtime

if TYPE_CHECKING:
    from stagelaunch.supervisor.control import ControlServer

HEAD_START_S = 0.3
"""Of the stages before the import; whoever connects in the meantime waits so much longer."""


class ControlService:
    """``lock`` is the held lock of the runtime. ``restore`` writes what else belongs into a new runtime directory."""

    def __init__(
        self,
        runtime: Runtime,
        lock: FileLock,
        handlers: Handlers,
        say: Callable[[str], None],
        restore: Callable[[], None],
    ) -> None:
        self._handlers = handlers
        self._say = say
        self._endpoint = ControlSocket(runtime)
        self._keeper = Keeper(runtime, lock, self._endpoint, say, restore)
        self._server: ControlServer | None = None
        self._serving: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Listen; whoever connects is answered soon. ConfigError where the socket cannot be made."""
        self._endpoint.bind()
        self._keeper.start()
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Answer no more, and remove the socket. Whoever follows events or logs is told the rest."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        await self._keeper.close()
        if self._server is not None:
            await self._server.close()
        self._endpoint.close()

    async def _serve(self) -> None:
        try:
            # Stages first: they start, and one that dies at once is answered, without an import beside.
            await asyncio.sleep(HEAD_START_S)
            # In a thread, while stages are watched: it takes as long as all that came before.
            control = await _imported("stagelaunch.supervisor.control")
            self._server = control.ControlServer(self._endpoint, self._handlers)
            await self._server.start()
        except Exception as error:
            self._say(f"internal error, nobody is answered on the control socket: {error!r}")


async def _imported(name: str) -> Any:
    """The module, imported in a thread that nobody waits for in the end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(module: Any, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(module)
        else:
            done.set_exception(error)

    def work() -> None:
        module, error = None, None
        try:
            module = import_module(name)
        except Exception as caught:
            error = caught
        # The loop may be over.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, module, error)

    threading.Thread(target=work, name="import", daemon=True).start()
    return await done
