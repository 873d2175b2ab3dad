"""Says what the worker does, one message a transition, over the socket to its supervisor."""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from stagelaunch.core import messages as m
from stagelaunch.core.errors import BudgetOvershootError, ExitCode, StageError, StagelaunchError
from stagelaunch.core.ledger import Ledger
from stagelaunch.core.phases import LockMode, Phase

MAX_TEXT_CHARS = 4_000
MAX_TRACEBACK_CHARS = 16_000
PROGRESS_EVERY_S = 0.1
"""Progress is said at most this often; the last of a phase always."""


class Reporter:
    """Sends messages; knows the phase the worker is in. A supervisor that is gone ends the worker elsewhere."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        """The control thread answers while the main thread reports: neither may end up inside the other's line."""
        self._waited_s = 0.0
        self._progress_at_s = 0.0
        self.current = Phase.SPAWN

    def now(self) -> float:
        """Monotonic seconds, comparable between all processes of the machine."""
        return time.monotonic()

    def send(self, message: m.Message) -> None:
        """Send one message. A supervisor that is gone is no error here: the kernel signals its death."""
        line = m.encode(message)
        with self._sending, suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendall(line)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Report entering and leaving a phase; on an exception only entering, so ``current`` names the culprit."""
        self.current = phase
        self._waited_s = 0.0
        self._progress_at_s = 0.0
        self.send(m.PhaseBegan(phase, self.now()))
        yield
        self.send(m.PhaseEnded(phase, self.now(), self._waited_s))

    def lock_waits(self, mode: LockMode, holders: tuple[str, ...]) -> None:
        """The lock is held by others."""
        self.send(m.LockWaits(self.current, mode, holders, self.now()))

    def lock_taken(self, mode: LockMode, waited_s: float) -> None:
        """The lock is ours."""
        self._waited_s += waited_s
        self.send(m.LockTaken(self.current, mode, waited_s, self.now()))

    def lock_released(self, mode: LockMode, at_s: float) -> None:
        """The lock was ours until then."""
        self.send(m.LockReleased(self.current, mode, at_s))

    def progress(self, done: int, total: int, unit: str) -> None:
        """How far the phase is; rate-limited."""
        now_s = self.now()
        if done < total and now_s - self._progress_at_s < PROGRESS_EVERY_S:
            return
        self._progress_at_s = now_s
        self.send(m.Progress(self.current, int(done), int(total), unit, now_s))

    def ledger(self, ledger: Ledger, *, final: bool) -> None:
        """The stage's ledger."""
        self.send(m.LedgerKnown(ledger, final))

    def log_lost(self, text: str) -> None:
        """The stage's log cannot be opened."""
        self.send(m.LogLost(text))

    def ready(self) -> None:
        """The stage answers from now on."""
        self.current = Phase.READY
        self.send(m.Ready(self.now()))

    def failed(self, error: BaseException) -> None:
        """The stage gives up because of ``error``."""
        code = error.exit_code if isinstance(error, StagelaunchError) else ExitCode.STAGE_FAILED
        text = _text(error)
        # An error of ours says what to do; where in our code it was raised helps nobody.
        trace = "" if isinstance(error, StagelaunchError) else "".join(traceback.format_exception(error))
        # The whole of it goes to the stage's log, whatever a library has put in its place; what is sent must fit a line
        # that the supervisor takes.
        with suppress(Exception):
            print(trace or text, file=sys.stderr, flush=True)
        text, trace = _shortened(text, MAX_TEXT_CHARS), _shortened(trace, MAX_TRACEBACK_CHARS)
        retry = isinstance(error, StageError) and error.retry
        over = error.overshoot_bytes if isinstance(error, BudgetOvershootError) else 0
        self.send(m.Failed(self.current, type(error).__name__, text, trace, int(code), self.now(), retry, over))


def _text(error: BaseException) -> str:
    """What it says: it is of a library, and may not even be able to."""
    try:
        return str(error) or type(error).__name__
    except Exception as broken:
        return f"{type(error).__name__}, and what it says cannot be had: it raises {type(broken).__name__}"


def _shortened(text: str, limit: int) -> str:
    """The beginning and the end: the one names the error, the other is where it was raised."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... {len(text) - limit} characters left out ...\n{text[-limit // 2 :]}"
