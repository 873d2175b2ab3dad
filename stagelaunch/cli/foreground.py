"""The supervisor's side of ``stagelaunch up``: runs the deployment and says what happens, to people and to programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

from stagelaunch.cli.machine import simulated_machine
from stagelaunch.cli.pages import render_status
from stagelaunch.cli.streams import discard, is_file, reopen_output, takes_more, write_patiently
from stagelaunch.cli.target import Target
from stagelaunch.core import failure
from stagelaunch.core.errors import ExitCode, StagelaunchError
from stagelaunch.core.outcome import Outcome
from stagelaunch.core.run_options import RunOptions
from stagelaunch.core.units import format_duration
from stagelaunch.supervisor.run import Listener, run_deployment
from stagelaunch.system.log_file import heading, now


def run_foreground(target: Target, notify: IO[str] | None, options: RunOptions) -> int:
    """Run the deployment to its end, and say how that was; the exit code."""
    loaded = target.loaded
    assert loaded is not None
    own_log = target.runtime.supervisor_log if is_file(2, target.runtime.supervisor_log) else None
    voice = Voice(notify, own_log, str(loaded.path), shows_stages=not options.quiet and own_log is None)
    # From a log rotation that comes too early or too late for the loop: nothing to be killed by.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        machine = simulated_machine(loaded)
        outcome = asyncio.run(run_deployment(loaded, machine, target.runtime, voice.listener(), options))
    except StagelaunchError as error:
        voice.ended(error.exit_code, str(error))
        raise
    except (KeyboardInterrupt, asyncio.CancelledError):
        voice.ended(ExitCode.INTERRUPTED, "interrupted before any stage was started")
        raise KeyboardInterrupt from None
    text = _ending(target.name, outcome)
    for line in text.splitlines():
        voice.print(f"stagelaunch: {line}", err=True)
    voice.ended(outcome.exit_code, text)
    return outcome.exit_code


def _ending(name: str, outcome: Outcome) -> str:
    """The last words: the first failure with its evidence, what is left, and the state everything is in."""
    lines = [] if outcome.first is None else [failure.render(outcome.first, outcome.consequences)]
    lines += [f"LEFT BEHIND: {text}" for text in outcome.leftovers]
    state = "clean-up incomplete" if outcome.leftovers else "every stage is gone, device memory is back"
    lines.append(f"{name} stopped: {state} (exit {int(outcome.exit_code)})")
    return "\n".join(lines)


PATIENCE_S = 0.5
"""How long a stream that takes nothing may hold up the supervisor, once."""


class Voice:
    """Tells people (stderr), the page (stdout) and, when detached, whoever waits (a descriptor)."""

    def __init__(self, notify: IO[str] | None, own_log: Path | None, config: str, *, shows_stages: bool) -> None:
        self._config = config
        self._notify = notify
        self._own_log = own_log
        self._shows_stages = shows_stages
        self._lost: set[bool] = set()
        """Streams that could not be written: True for stderr, False for stdout."""
        self._left_out = {True: 0, False: 0}
        """What nobody has read so far: a stream that takes nothing is not waited for again until it does."""
        self._began_s = time.monotonic()

    def listener(self) -> Listener:
        """What the deployment tells."""
        show = self._show if self._shows_stages else None
        return Listener(self._say, lambda: self._tell(started=True), self._ready, show, self._reopen, self._begin)

    def _begin(self) -> None:
        """A log that goes on over many runs says where this one begins, and when."""
        if self._own_log is not None:
            self.print(heading(f"supervisor pid {os.getpid()}, config {self._config}"), err=True)

    def ended(self, code: int, text: str) -> None:
        """The last thing said."""
        self._tell(exit=int(code), text=text)

    def print(self, text: str, *, err: bool = False) -> None:
        """Print, or leave it out: a closed pipe, one that nobody reads, a full disk cost the words, never the
        deployment."""
        if err in self._lost:
            return
        stream, missed = (sys.stderr if err else sys.stdout), self._left_out[err]
        text = f"({missed} lines were left out here: nobody read them)\n{text}" if missed else text
        try:
            done = write_patiently(stream, f"{text}\n", 0.0 if missed else PATIENCE_S)
        except OSError:
            self._lost.add(err)
            discard(stream)
        else:
            self._left_out[err] = 0 if done else missed + 1

    def _say(self, text: str) -> None:
        line = f"[{format_duration(time.monotonic() - self._began_s):>7}] {text}"
        # A log is read days later, a terminal now; the journal has the time already.
        self.print(line if self._own_log is None else f"{now()} {line}", err=True)
        self._tell(line=line)

    def _show(self, line: str) -> bool:
        """A stage's line is worth no wait for a terminal or a pipe that takes nothing; False: try again later."""
        if True not in self._lost and not takes_more(sys.stderr):
            return False
        self.print(line, err=True)
        return True

    def _reopen(self) -> None:
        if self._own_log is not None:
            with contextlib.suppress(OSError):
                reopen_output(self._own_log)

    def _ready(self, body: dict[str, Any]) -> None:
        self.print(render_status(body))
        self._tell(ready=body)
        self._close()

    def _tell(self, **event: Any) -> None:
        if self._notify is None or ("line" in event and not takes_more(self._notify)):
            return
        try:
            if not write_patiently(self._notify, json.dumps(event) + "\n", PATIENCE_S):
                self._close()
        except OSError:
            self._close()

    def _close(self) -> None:
        if self._notify is not None:
            with contextlib.suppress(OSError):
                self._notify.close()
            self._notify = None
