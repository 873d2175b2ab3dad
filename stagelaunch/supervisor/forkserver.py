"""Has stages forked from processes that have imported their libraries: the supervisor's side of ``worker.forkserver``.

Stages with the same early environment share one (``core.preload``). One whose imports make it unfit to be forked, or
end it, is replaced by one that imports nothing; its stages import for themselves then. Decides nothing about stages.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagelaunch.core.preload import Environment, Preload, early_environment, preload_for
from stagelaunch.core.run_spec import StageRun
from stagelaunch.supervisor.forkserver_process import take
from stagelaunch.system.process import signal_name

_MAX_BYTES = 1 << 18


class Forked:
    """One process of a stage, from when it is asked for; ``pid`` is None until it runs."""

    def __init__(
        self,
        channel: socket.socket,
        on_started: Callable[[int], None],
        on_ended: Callable[[int], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.request: dict[str, Any] = {}
        self.channel: socket.socket | None = channel
        """The stage's end, until it is the stage's."""
        self.on_started = on_started
        self.on_ended = on_ended
        self.on_failed = on_failed
        self.pid: int | None = None
        self.server: _Server | None = None
        self._is_reaped = False

    @property
    def is_unreaped(self) -> bool:
        """Whether its pid, alive or dead, is nobody else's: its parent lives and keeps it."""
        return self.pid is not None and not self._is_reaped and self.server is not None and self.server.is_alive

    @property
    def is_orphaned(self) -> bool:
        """Nobody will tell how it ended."""
        return self.server is None or not self.server.is_alive

    def reap(self) -> None:
        """It has ended, and its number may become another's."""
        if self.is_unreaped and self.server is not None and self.pid is not None:
            self.server.reap(self.pid)
        self._is_reaped = True

    def withdraw(self) -> None:
        """It is not wanted any more, before it was heard of. One that is being forked will still be heard of."""
        if self.server is not None:
            self.server.withdraw(self)
        self.close_channel()

    def dump_imports(self) -> None:
        """Have what imports its libraries write its stack to its log."""
        if self.server is not None:
            self.server.dump_stacks()

    def close_channel(self) -> None:
        """The stage's end is the stage's, or nobody's."""
        if self.channel is not None:
            self.channel.close()
        self.channel = None


class Forkservers:
    """Starts the stages of one deployment. From the main thread only: their parent-death signals are tied to it."""

    def __init__(self, runs: Sequence[StageRun], log: Path, say: Callable[[str], None], *, preload: bool) -> None:
        self._runs = tuple(runs)
        self._log = log
        self._say = say
        self._numbers = itertools.count(1)
        self._preload = preload
        self._bare: set[Environment] = set()
        """Whose libraries cannot be imported before the fork."""
        self._current: dict[Environment, _Server] = {}
        self._all: list[_Server] = []
        self._is_closed = False

    def start(self, run: StageRun, run_file: Path, process: Forked) -> None:
        """Ask for this process, of this stage. OSError where that cannot even be asked."""
        process.request = {
            "start": next(self._numbers),
            "stage_id": run.stage_id,
            "name": run.name,
            "run_file": str(run_file),
        }
        self._server_for(run).ask(process)

    def close(self) -> None:
        """End them all, and with them whatever stage still runs."""
        self._is_closed = True
        for server in self._all:
            server.kill()
        for server in self._all:
            server.close()

    def _server_for(self, run: StageRun) -> _Server:
        early = early_environment(run)
        server = self._current.get(early)
        if server is None or not server.is_alive:
            wanted = preload_for(run, self._runs)
            if not self._preload or early in self._bare:
                wanted = replace(wanted, engines=())
            if wanted.engines:
                names = [each.name for each in self._runs if early_environment(each) == early]
                self._say(f"importing the libraries of {', '.join(names)}; then they are started")
            server = self._current[early] = _Server(wanted, self._log, self._say, self._on_useless)
            self._all.append(server)
        return server

    def _on_useless(self, server: _Server, waiting: list[Forked], why: str | None) -> None:
        """Those who wait for it need another one; ``why``: imports are to blame, and not to be tried again."""
        if self._is_closed:
            return
        early = server.preload.environment
        if self._current.get(early) is server:
            del self._current[early]
        if why is not None and server.preload.engines:
            self._bare.add(early)
            self._say(f"cannot fork stages from one process: {why}; each imports its libraries itself")
        elif why is not None:
            for process in waiting:
                process.on_failed(why)
            return
        for process in waiting:
            run = next(run for run in self._runs if run.stage_id == process.request["stage_id"])
            try:
                self._server_for(run).ask(process)
            except OSError as error:
                process.on_failed(str(error))


class _Server:
    """One process that forks stages."""

    def __init__(
        self,
        preload: Preload,
        log: Path,
        say: Callable[[str], None],
        on_useless: Callable[[_Server, list[Forked], str | None], None],
    ) -> None:
        self.preload = preload
        self._say = say
        self._on_useless = on_useless
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Forked] = {}
        self._running: dict[int, Forked] = {}
        self._unsent: list[Forked] = []
        self._is_importing = False
        self._may_fork = False
        self._why_useless: str | None = None
        self.is_alive = True
        self._process = take()
        self._process.begin(dict(preload.environment), preload.engines, preload.backend, log)
        self._loop.add_reader(self._process.channel, self._read)
        self._loop.add_reader(self._process.pidfd, self._on_death)

    def ask(self, process: Forked) -> None:
        """Have it fork this process, as soon as everything is imported."""
        process.server = self
        self._waiting[process.request["start"]] = process
        self._unsent.append(process)
        self._send_unsent()

    def withdraw(self, process: Forked) -> None:
        """Do not fork it, if that has not been asked for yet."""
        if process in self._unsent:
            self._unsent.remove(process)
            del self._waiting[process.request["start"]]

    def reap(self, pid: int) -> None:
        """This stage has ended, and its number may become another's."""
        self._process.send({"reap": pid})

    def dump_stacks(self) -> None:
        """It says where it is, and goes on."""
        if self.is_alive and self._is_importing:
            self._process.signal(signal.SIGQUIT)

    def kill(self) -> None:
        """End it, and its stages. Does not wait."""
        if self.is_alive:
            self._process.kill()

    def close(self) -> None:
        """Wait for its end after ``kill``."""
        if self.is_alive:
            self._end()

    def _send_unsent(self) -> None:
        """As many as it has room for."""
        while self._unsent:
            process = self._unsent[0]
            assert process.channel is not None
            try:
                if not self._process.send(process.request, process.channel.fileno()):
                    return
            except OSError as error:
                del self._waiting[process.request["start"]]
                self._loop.call_soon(process.on_failed, str(error))
            del self._unsent[0]

    def _read(self) -> None:
        while self.is_alive:
            try:
                data = self._process.channel.recv(_MAX_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                # Its pidfd says how it ended.
                self._loop.remove_reader(self._process.channel)
                return
            self._take(json.loads(data))
            # It may have taken something.
            self._send_unsent()

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"kind": "importing"}:
                self._is_importing = True
            case {"kind": "imported", "unfit": reason}:
                self._imported(reason)
            case {"kind": "started", "number": number, "pid": pid}:
                process = self._waiting.pop(number)
                process.close_channel()
                process.pid = pid
                self._running[pid] = process
                process.on_started(pid)
            case {"kind": "not started", "number": number, "reason": reason}:
                self._waiting.pop(number).on_failed(reason)
            case {"kind": "ended", "pid": pid, "code": code}:
                self._running.pop(pid).on_ended(code)

    def _imported(self, unfit: str | None) -> None:
        if unfit is not None:
            self._why_useless = unfit
            self._process.kill()
            return
        self._may_fork = True

    def _on_death(self) -> None:
        # What it still said comes before its end.
        self._read()
        code, pid = self._end(), self._process.pid
        assert code is not None
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        why = self._why_useless or f"the process that imports their libraries (pid {pid}) {how}"
        if self._may_fork:
            self._say(f"the process that stages are forked from (pid {pid}) {how}: its stages end with it")
        # But for those that were withdrawn meanwhile.
        waiting = [process for process in self._waiting.values() if process.channel is not None]
        self._waiting.clear()
        self._unsent.clear()
        self._on_useless(self, waiting, None if self._may_fork else why)

    def _end(self) -> int | None:
        self.is_alive = False
        self._loop.remove_reader(self._process.channel)
        self._loop.remove_reader(self._process.pidfd)
        return self._process.wait()
