"""One stage's process as its supervisor holds it: start, listen, signal, let go.

Its parent is a forkserver, which says how it ended. It is watched through a pidfd as well: a forkserver can be stopped,
or killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stagelaunch.core import messages as m
from stagelaunch.core.run_spec import StageRun
from stagelaunch.supervisor.forkserver import Forked, Forkservers
from stagelaunch.supervisor.own_run import OwnRun, StageFamily

MAX_LINE_BYTES = 1 << 20
READ_BYTES = 1 << 16
LAST_WORDS_BYTES = 1 << 19
"""More than a socket holds."""
EXIT_CODE_S = 1.0
"""How long after a stage's end its forkserver has to say how it ended."""


@dataclass(frozen=True)
class Listener:
    """Called from the event loop."""

    on_message: Callable[[m.Message], None]
    on_started: Callable[[], None]
    """It runs, and has its pid."""
    on_exit: Callable[[int | None], None]
    """It is over: its exit code, or minus the signal's number; None where it was stopped before it ran. Once."""
    on_failed: Callable[[str], None]
    """It cannot be started, and why. Instead of ``on_exit``."""


class StageProcess:
    """A worker that was asked for; ``pid`` is None until it runs. OSError where it cannot even be asked for."""

    def __init__(
        self, forkservers: Forkservers, run: StageRun, run_file: Path, listener: Listener, own_run: OwnRun | None = None
    ) -> None:
        self.pid: int | None = None
        self._name = run.name
        self._own_run = own_run
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._pidfd: int | None = None
        self._family: StageFamily | None = None
        self._is_unwanted = False
        self._quit: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()
        self._channel, theirs = socket.socketpair()
        self._forked = Forked(theirs, self._started, self._over, self._failed)
        try:
            forkservers.start(run, run_file, self._forked)
        except OSError:
            self._forked.close_channel()
            self._channel.close()
            raise
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._read)

    def ask_to_stop(self) -> None:
        """Have it leave in good order."""
        if self.pid is None:
            self._give_up_start()
        else:
            self.send(m.Stop())

    def send(self, message: m.Message) -> None:
        """Tell the worker something. One that is gone or does not read is found by its exit or its deadline."""
        with contextlib.suppress(OSError):
            self._channel.send(m.encode(message))

    def terminate(self) -> None:
        """SIGTERM to the leader, and SIGCONT: a stopped process acts on nothing else."""
        if self.pid is None:
            self._give_up_start()
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def dump_stacks(self, answer_s: float) -> None:
        """Ask for the stacks of all its threads, in its log; before it runs, of what imports its libraries.

        Not by a signal at first: its handler reads the frames of threads that run, and can crash the stage. One that
        has not done it ``answer_s`` later does not give its threads the interpreter: then they do not run, either.
        """
        if self.pid is None:
            self._forked.dump_imports()
            return
        at_s = self._loop.time() + answer_s
        if self._quit is not None:
            # Asked before: it has no longer for that, or one that is late would be given up without its stacks.
            at_s = min(at_s, self._quit.when())
        self._cancel_quit()
        self.send(m.DumpStacks())
        self._quit = self._loop.call_at(at_s, self._send_quit)

    def _send_quit(self) -> None:
        self._quit = None
        self._signal(signal.SIGQUIT)

    def _cancel_quit(self) -> None:
        if self._quit is not None:
            self._quit.cancel()
            self._quit = None

    def kill(self) -> None:
        """SIGKILL to the leader and to all that it has started. Never waits.

        Its tree first: a leader that is dead has none any more, and in the next look what it still forked is found.
        """
        if self.pid is None:
            self._give_up_start()
        self._kill_family()
        self._signal(signal.SIGKILL)
        self._kill_family()

    def _kill_family(self) -> None:
        if self._family is not None:
            self._family.kill(is_leader_ours=self._forked.is_unreaped)

    def _signal(self, number: signal.Signals) -> None:
        # Once it is let go of its descriptor is closed, and the number may name something else.
        if self._pidfd is not None and not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _give_up_start(self) -> None:
        """It does not run yet, and is not to: nothing has begun that could end in good order."""
        if self.ended.is_set():
            return
        self._is_unwanted = True
        self._forked.withdraw()
        self._end()
        # Not from within the call that asked for it.
        self._loop.call_soon(self._listener.on_exit, None)

    def _started(self, pid: int) -> None:
        if self._is_unwanted:
            # Its parent keeps the number until it is told otherwise, or is dead and has taken it along.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.pid = pid
            self._over(-signal.SIGKILL)
            return
        except OSError as error:
            # Out of descriptors: a process that cannot be watched must not live.
            os.kill(pid, signal.SIGKILL)
            self._is_unwanted = True
            self._end()
            self._listener.on_failed(str(error))
            return
        self.pid = pid
        self._family = StageFamily.begin(pid, self._name, self._own_run)
        self._loop.add_reader(self._pidfd, self._is_dead)
        self._listener.on_started()

    def _failed(self, why: str) -> None:
        if not self.ended.is_set():
            self._end()
            self._listener.on_failed(why)

    def _is_dead(self) -> None:
        """Its pidfd says so. Its parent says how it ended; where that is gone too, it took the stage along."""
        assert self._pidfd is not None
        self._loop.remove_reader(self._pidfd)
        wait_s = 0.0 if self._forked.is_orphaned else EXIT_CODE_S
        self._loop.call_later(wait_s, self._over, -signal.SIGKILL)

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
                message = m.decode(line)
                if isinstance(message, m.StacksDumped):
                    self._cancel_quit()
                else:
                    self._listener.on_message(message)

    def _over(self, code: int) -> None:
        if self.ended.is_set():
            self._forked.reap()
            return
        self._drain()
        self.ended.set()
        try:
            # First, so that the others hear at once what it means for them: the search below takes its time.
            self._listener.on_exit(code)
        finally:
            # Until it is reaped its number means its tree, group and session.
            self._kill_family()
            self._forked.reap()
            self._end()

    def _end(self) -> None:
        """Let go of everything."""
        self.ended.set()
        self._cancel_quit()
        self._loop.remove_reader(self._channel)
        self._channel.close()
        self._forked.close_channel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._family is not None:
            self._family.end()

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
