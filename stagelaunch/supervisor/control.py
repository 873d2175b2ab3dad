"""The supervisor's own door: HTTP and JSON over a Unix socket that only its user can open."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stagelaunch.core.errors import StagelaunchError
from stagelaunch.supervisor.control_socket import API_VERSION, ControlSocket, Handlers
from stagelaunch.supervisor.logs import follow_logs

SHUTDOWN_S = 1.0
"""How long an unfinished request may hold up the end."""
LOG_LINES = 100
"""How many lines of each log are given where the request does not say."""
REQUEST_S = 10.0
"""How long a connection may stay without a whole request."""
IDLE_S = 10.0
"""How long one may stay after its last request."""
CONNECTIONS_MAX = 128
"""With more, whoever has asked nothing for longest is closed: descriptors are needed for other things than clients
that leak them."""
_PEERCRED = struct.Struct("3i")
_log = logging.getLogger(__name__)
_CLIENTS_OWN = (HttpProcessingError, ConnectionError)
"""What is no HTTP is answered, and a client may go at any time: neither is worth a word here."""
_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _CLIENTS_OWN)))


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ControlServer:
    """Answers on a socket that is bound, until closed."""

    def __init__(self, endpoint: ControlSocket, handlers: Handlers) -> None:
        self._endpoint = endpoint
        self._handlers = handlers
        self._closing = asyncio.Event()
        self._silent: dict[asyncio.BaseTransport, None] = {}
        """Connections that have not sent a whole request yet, the oldest first."""
        app = web.Application(middlewares=[self._note_request, _same_user_only, _errors_as_json])
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/events", self._events)
        app.router.add_get("/v1/logs", self._logs)
        for prefix, suffix in (("/v1/", ""), ("/", "z")):
            app.router.add_get(f"{prefix}health{suffix}", self._health)
            app.router.add_get(f"{prefix}ready{suffix}", self._ready)
        app.router.add_post("/v1/down", self._down)
        app.router.add_post("/v1/probe", self._probe)
        app.router.add_post("/v1/restart", self._restart)
        # Requests are polls from our own command line: nothing worth a log line each. Cancelled when the client goes:
        # a follower of a quiet deployment would otherwise stay for good.
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True,
            keepalive_timeout=IDLE_S, logger=_log,
        )  # fmt: skip

    async def start(self) -> None:
        """Answer whoever connects."""
        await self._runner.setup()
        await self._endpoint.serve(self._admit)

    async def close(self) -> None:
        """Stop answering. Whoever follows the logs is told the rest."""
        self._closing.set()
        self._endpoint.stop()
        await self._runner.cleanup()

    def _admit(self, transport: asyncio.Transport) -> None:
        server = self._runner.server
        if server is None or (len(server.connections) >= CONNECTIONS_MAX and not self._make_room()):
            transport.abort()
            return
        handler = server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        self._silent[transport] = None
        asyncio.get_running_loop().call_later(REQUEST_S, self._dismiss_silent, transport)

    def _make_room(self) -> bool:
        """False where every connection is in use."""
        while self._silent:
            oldest = next(iter(self._silent))
            if self._dismiss_silent(oldest):
                return True
        return False

    def _dismiss_silent(self, transport: asyncio.BaseTransport) -> bool:
        """Close it if it has asked nothing and is there still; whether it was."""
        if transport not in self._silent:
            return False
        del self._silent[transport]
        was_open = not transport.is_closing()
        if isinstance(transport, asyncio.Transport):
            transport.abort()
        return was_open

    @web.middleware
    async def _note_request(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.transport is not None:
            self._silent.pop(request.transport, None)
        return await handler(request)

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(await self._handlers.status())

    async def _health(self, _: web.Request) -> web.Response:
        body = self._handlers.health()
        return web.json_response(body, status=200 if body["healthy"] else 503)

    async def _ready(self, _: web.Request) -> web.Response:
        body = self._handlers.health()
        return web.json_response(body, status=200 if body["ready"] else 503)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await _stream(request, self._handlers.events.follow(wait=request.query.get("follow") == "1"))

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        known = self._handlers.logs
        wanted = request.query.getall("stage", list(known))
        lines = request.query.get("lines", str(LOG_LINES))
        if missing := [name for name in wanted if name not in known]:
            return _error(404, f"{', '.join(missing)}: no such stage (there are: {', '.join(known)})")
        if not lines.isdecimal() or len(lines) > 9:
            return _error(400, f"lines is {lines!r}; give a number")
        ended = self._closing if request.query.get("follow") == "1" else None
        return await _stream(request, follow_logs({name: known[name] for name in wanted}, int(lines), ended))

    async def _down(self, request: web.Request) -> web.Response:
        self._handlers.down(request.query.get("now") == "1")
        return web.json_response({"version": API_VERSION, "stopping": True}, status=202)

    async def _restart(self, request: web.Request) -> web.Response:
        if self._handlers.restart is None:
            return _error(501, "this supervisor cannot start a single stage again")
        name = request.query.get("stage", "")
        if name not in self._handlers.logs:
            return _error(404, f"{name or '(none named)'}: no such stage (there are: {', '.join(self._handlers.logs)})")
        refusal = await self._handlers.restart(name)
        if refusal is not None:
            return _error(409, refusal)
        return web.json_response({"version": API_VERSION, "restarting": name}, status=202)

    async def _probe(self, request: web.Request) -> web.Response:
        known = self._handlers.logs
        wanted = request.query.getall("stage", list(known))
        if missing := [name for name in wanted if name not in known]:
            return _error(404, f"{', '.join(missing)}: no such stage (there are: {', '.join(known)})")
        results = [await self._probe_one(name) for name in wanted]
        return web.json_response({"version": API_VERSION, "results": results})

    async def _probe_one(self, name: str) -> dict[str, Any]:
        # Looked at now: the probes before this one took their time.
        stage_id = self._handlers.ready_stages().get(name)
        if stage_id is None:
            return {"stage": name, "error": "it is not ready"}
        try:
            answer = asdict(await self._handlers.probe(stage_id))
            if not math.isfinite(answer["max_abs_diff"]):
                # JSON has no such number, and the stage's output is no use.
                answer.update(max_abs_diff=None, error="its output is not finite")
            return {"stage": name, **answer}
        except (TimeoutError, ConnectionResetError) as error:
            return {"stage": name, "error": str(error) or "no answer in time"}


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"version": API_VERSION, "error": text}, status=status)


async def _stream(request: web.Request, records: AsyncGenerator[dict[str, Any], None]) -> web.StreamResponse:
    """One JSON object a line, each as soon as it is there."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    async with aclosing(records):
        async for record in records:
            await response.write(json.dumps(record).encode() + b"\n")
    await response.write_eof()
    return response


@web.middleware
async def _same_user_only(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """The file mode already keeps others out; a descriptor can be passed on, so the peer's uid is checked too."""
    connection: socket.socket | None = None if request.transport is None else request.transport.get_extra_info("socket")
    if connection is None:
        return _error(403, "connection is gone")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    _, uid, _ = _PEERCRED.unpack(raw)
    if uid not in (0, os.getuid()):
        return _error(403, f"uid {uid} may not control this deployment")
    return await handler(request)


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except StagelaunchError as error:
        return _error(503, str(error))
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")
