"""The control socket itself: where a deployment listens. Not what it answers: that is ``control``, imported later,
because the library it is built on takes as long to import as all the rest."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagelaunch.core import messages as m
from stagelaunch.core.errors import ConfigError, Fault
from stagelaunch.supervisor.events import EventLog
from stagelaunch.supervisor.runtime import Runtime

API_VERSION = 1
WAITING_MAX = 128
"""So many may have connected before ``serve``."""


@dataclass(frozen=True)
class Handlers:
    """What the control socket can ask of the supervisor."""

    status: Callable[[], Awaitable[dict[str, Any]]]
    down: Callable[[bool], None]
    """True: now, without asking the stages first."""
    ready_stages: Callable[[], dict[str, int]]
    """Name -> id of the stages that answer probes now."""
    probe: Callable[[int], Awaitable[m.Probed]]
    health: Callable[[], dict[str, Any]]
    """``status.health_body``: state, phase of each stage, ``healthy`` and ``ready``. Asks no driver."""
    events: EventLog
    logs: Mapping[str, Path]
    """The log of each stage, by name."""
    restart: Callable[[str], Awaitable[str | None]] | None = None
    """Start a stage again, by name; the answer says why that cannot be, None: it has begun."""


class ControlSocket:
    """Listens from ``bind`` to ``close``; whoever connects before ``serve`` waits. The caller owns the deployment."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._admit: Callable[[asyncio.Transport], None] | None = None
        self._bound: os.stat_result | None = None

    def bind(self) -> None:
        """Listen, in the place of a socket that a dead supervisor left. ConfigError where that cannot be."""
        try:
            self._bind()
        except OSError as error:
            text = f"cannot be made: {error.strerror}; remove what is there, or set runtime_dir to another directory"
            raise ConfigError((Fault(str(self._runtime.socket), None, None, text),)) from error

    async def serve(self, admit: Callable[[asyncio.Transport], None]) -> None:
        """Give every connection to ``admit``."""
        self._admit = admit
        await self._accept()

    async def look(self) -> bool:
        """Whether the socket is where it belongs; if it is not, a new one is made. OSError where that cannot be."""
        if self._is_in_place():
            return True
        self._bind()
        await self._accept()
        return False

    def stop(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()
        self._server = self._listener = None

    def close(self) -> None:
        """Take no more connections and remove the socket."""
        self.stop()
        if self._is_in_place():
            self._runtime.socket.unlink(missing_ok=True)

    def _is_in_place(self) -> bool:
        try:
            now = self._runtime.socket.stat(follow_symlinks=False)
        except OSError:
            return False
        return self._bound is not None and os.path.samestat(now, self._bound)

    def _bind(self) -> None:
        self._runtime.socket.unlink(missing_ok=True)
        listener = bind_short(self._runtime)
        self._bound = self._runtime.socket.stat(follow_symlinks=False)
        if self._listener is not None:
            self._listener.close()
        self._listener = listener

    async def _accept(self) -> None:
        admit, listener = self._admit, self._listener
        if admit is None or listener is None:
            return
        # Its own from here on.
        self._listener = None
        loop = asyncio.get_running_loop()
        old, self._server = self._server, await loop.create_server(lambda: _Guest(admit), sock=listener)
        if old is not None:
            old.close()


class _Guest(asyncio.Protocol):
    """A connection that was just accepted, until ``admit`` has given it to the server or closed it."""

    def __init__(self, admit: Callable[[asyncio.Transport], None]) -> None:
        self._admit = admit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._admit(transport)


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
    listener.listen(WAITING_MAX)
    listener.setblocking(False)
    return listener
