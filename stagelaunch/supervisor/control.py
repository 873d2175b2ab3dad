"""The supervisor's own door: HTTP and JSON over a Unix socket that only its user can open."""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web

from stagelaunch.core import messages as m
from stagelaunch.core.errors import StagelaunchError
from stagelaunch.supervisor.runtime import Runtime

API_VERSION = 1
SHUTDOWN_S = 1.0
"""How long an unfinished request may hold up the end."""
_PEERCRED = struct.Struct("3i")


@dataclass(frozen=True)
class Handlers:
    """What the control socket can ask of the supervisor."""

    status: Callable[[], Awaitable[dict[str, Any]]]
    down: Callable[[bool], None]
    """True: now, without asking the stages first."""
    ready_stages: Callable[[], dict[str, int]]
    """Name -> id of the stages that answer probes now."""
    probe: Callable[[int], Awaitable[m.Probed]]


class ControlServer:
    """Serves until closed. ``start`` replaces a socket that a dead supervisor left; the caller owns the deployment."""

    def __init__(self, runtime: Runtime, handlers: Handlers) -> None:
        self._runtime = runtime
        self._handlers = handlers
        app = web.Application(middlewares=[_same_user_only])
        app.router.add_get("/v1/status", self._status)
        app.router.add_post("/v1/down", self._down)
        app.router.add_post("/v1/probe", self._probe)
        # Requests are polls from our own command line: nothing worth a log line each.
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S)

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        self._runtime.socket.unlink(missing_ok=True)
        await web.SockSite(self._runner, bind_short(self._runtime)).start()

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        await self._runner.cleanup()
        self._runtime.socket.unlink(missing_ok=True)

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(await self._handlers.status())

    async def _down(self, request: web.Request) -> web.Response:
        self._handlers.down(request.query.get("now") == "1")
        return web.json_response({"version": API_VERSION, "stopping": True}, status=202)

    async def _probe(self, request: web.Request) -> web.Response:
        ready = self._handlers.ready_stages()
        wanted = request.query.getall("stage", list(ready))
        missing = [name for name in wanted if name not in ready]
        if missing or not wanted:
            text = (
                f"{', '.join(missing)}: no such stage is ready (ready: {', '.join(ready) or 'none'})"
                if missing
                else "no stage is ready"
            )
            return web.json_response({"version": API_VERSION, "error": text}, status=409)
        results = [await self._probe_one(name, ready[name]) for name in wanted]
        return web.json_response({"version": API_VERSION, "results": results})

    async def _probe_one(self, name: str, stage_id: int) -> dict[str, Any]:
        try:
            answer = asdict(await self._handlers.probe(stage_id))
            if not math.isfinite(answer["max_abs_diff"]):
                # JSON has no such number, and the stage's output is no use.
                answer.update(max_abs_diff=None, error="its output is not finite")
            return {"stage": name, **answer}
        except (TimeoutError, ConnectionResetError) as error:
            return {"stage": name, "error": str(error) or "no answer in time"}


@web.middleware
async def _same_user_only(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The file mode already keeps others out; a descriptor can be passed on, so the peer's uid is checked too."""
    connection: socket.socket | None = None if request.transport is None else request.transport.get_extra_info("socket")
    if connection is None:
        raise web.HTTPForbidden(text="connection is gone")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    _, uid, _ = _PEERCRED.unpack(raw)
    if uid not in (0, os.getuid()):
        raise web.HTTPForbidden(text=f"uid {uid} may not control this deployment")
    try:
        return await handler(request)
    except StagelaunchError as error:
        return web.json_response({"version": API_VERSION, "error": str(error)}, status=503)


def bind_short(runtime: Runtime) -> socket.socket:
    """A listening socket at the runtime's path, mode 0600. Bound through a directory descriptor, because a socket
    address holds 107 bytes and a runtime directory may be deeper."""
    directory = os.open(runtime.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{runtime.socket.name}")
        finally:
            os.umask(before)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(directory)
    listener.listen(64)
    listener.setblocking(False)
    return listener
