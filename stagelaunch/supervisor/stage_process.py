"""One stage's process as its supervisor holds it: start, listen, signal, reap.

Waited for through a pidfd: ``Process.sentinel`` misreports when the stage forked a child that outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from pathlib import Path

from stagelaunch.core import messages as m
from stagelaunch.supervisor.own_run import OwnRun, StageFamily
from stagelaunch.supervisor.worker_entry import enter_worker

MAX_LINE_BYTES = 1 << 20
READ_BYTES = 1 << 16
LAST_WORDS_BYTES = 1 << 19
"""More than a socket holds."""


class StageProcess:
    """A started worker. ``on_message`` and ``on_exit`` are called from the event loop; ``on_exit`` exactly once."""

    def __init__(
        self,
        run_file: Path,
        stage_id: int,
        name: str,
        on_message: Callable[[m.Message], None],
        on_exit: Callable[[int], None],
        run: OwnRun | None = None,
    ) -> None:
        self.stage_id = stage_id
        self.name = name
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self.ended = asyncio.Event()
        ours, theirs = socket.socketpair()
        with theirs:
            # daemon=False: a stage may start children of its own. From the main thread: the parent-death signal is
            # tied to the thread that forks.
            self._process: SpawnProcess = multiprocessing.get_context("spawn").Process(
                target=enter_worker, args=(str(run_file), stage_id, os.getpid(), theirs), name=name, daemon=False
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            # Out of descriptors: a process that cannot be watched must not live.
            self._process.kill()
            self._process.join()
            ours.close()
            raise
        self._family = StageFamily.begin(self.pid, name, run)
        ours.setblocking(False)
        self._channel = ours
        self._loop.add_reader(ours, self._read)
        self._loop.add_reader(self._pidfd, self._reap)

    def send(self, message: m.Message) -> None:
        """Tell the worker something. One that is gone or does not read is found by its exit or its deadline."""
        with contextlib.suppress(OSError):
            self._channel.send(m.encode(message))

    def terminate(self) -> None:
        """SIGTERM to the leader, and SIGCONT: a stopped process acts on nothing else."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def dump_stacks(self) -> None:
        """Ask for the stacks of all its threads, in its log. Only once it has said something: before, this kills it."""
        self._signal(signal.SIGQUIT)

    def kill(self) -> None:
        """SIGKILL to the leader and to all that it has started. Never waits.

        Its tree first: a leader that is dead has none any more, and in the next look what it still forked is found.
        """
        self._family.kill(is_leader_ours=self._is_ours())
        self._signal(signal.SIGKILL)
        self._family.kill(is_leader_ours=self._is_ours())

    def _signal(self, number: signal.Signals) -> None:
        # Once reaped its descriptor is closed, and the number may name something else.
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _is_ours(self) -> bool:
        """Whether the leader is not reaped: until then its pid, and so its group's and session's id, is nobody else's.

        A later ``Process.start()`` may have reaped it.
        """
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _read(self) -> None:
        try:
            data = self._channel.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._loop.remove_reader(self._channel)
            return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            self._buffer = b""
        for line in lines:
            # A library that scribbles on the channel must not take the supervisor down.
            with contextlib.suppress(ValueError):
                self._on_message(m.decode(line))

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._drain()
        self._loop.remove_reader(self._channel)
        self.ended.set()
        try:
            # First, so that the others hear at once what it means for them: the search below takes its time.
            self._on_exit(self._exit_code())
        finally:
            self._family.kill(is_leader_ours=self._is_ours())
            self._process.join()
            self._channel.close()
            os.close(self._pidfd)
            self._process.close()
            self._family.end()

    def _exit_code(self) -> int:
        """Of the dead leader, which stays unreaped: until then its number means its tree, group and session."""
        with contextlib.suppress(ChildProcessError):
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        # A later ``Process.start()`` has reaped it.
        code = self._process.exitcode
        assert code is not None, "the pidfd said the process is over"
        return code

    def _drain(self) -> None:
        """Read what the dead worker still said: its last words come before its exit is reported.

        No more than it can have left there: a child that has its end too may go on writing.
        """
        for _ in range(LAST_WORDS_BYTES // READ_BYTES):
            try:
                data = self._channel.recv(READ_BYTES)
            except (BlockingIOError, ConnectionResetError):
                return
            if not data:
                return
            self._feed(data)
