"""Keeps the timeline of a run (`core.timeline`) and writes it to ``timeline.json`` in the runtime directory.

The file outlives the run, and a supervisor that is killed leaves it as of its last write. Decides nothing, and costs
nobody a stage: what cannot be written is said. Of one event loop. Used by ``supervisor.session``, told by
``supervisor.supervisor``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagelaunch.core import messages as m
from stagelaunch.core import timeline as tl
from stagelaunch.core.run_spec import StageRun
from stagelaunch.core.timeline import Attempt, Timeline
from stagelaunch.supervisor.runtime import write_atomically

WRITE_EVERY_S = 1.0
"""What is new is on disk so much later; a large deployment's file is written less often."""
WRITE_SHARE = 0.05
"""Of the loop's time, at most."""
KEPT_RESTARTS = 200
"""Processes kept that were started after the boot; the oldest that are over go first."""


class TimelineRecorder:
    """The timeline of one run, from its first stage to its end. Replaces the one of the run before at once."""

    def __init__(
        self,
        path: Path,
        deployment: str,
        order: str,
        groups: tuple[tuple[int, ...], ...],
        say: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._path, self._say = path, say
        self._zero_s = self._loop.time()
        self._timeline = Timeline(deployment, time.time(), order, groups, (), 0.0)
        self._attempts: list[Attempt] = []
        self._latest: dict[int, int] = {}
        """Where the present process of each stage is among the attempts."""
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = WRITE_EVERY_S
        self._told = ""
        self._write()

    def started(self, run: StageRun, at_s: float) -> None:
        """The stage is to have a new process."""
        self._forget_old_restarts()
        self._latest[run.stage_id] = len(self._attempts)
        self._attempts.append(tl.begun(run.stage_id, run.name, run.device_index, None, at_s - self._zero_s))
        self._is_new()

    def runs(self, stage_id: int, pid: int) -> None:
        """The stage's new process runs."""
        place = self._latest[stage_id]
        self._attempts[place] = replace(self._attempts[place], pid=pid)
        self._is_new()

    def heard(self, stage_id: int, message: m.Message) -> None:
        """What the stage's process says."""
        place = self._latest.get(stage_id)
        if place is None:
            return
        before = self._attempts[place]
        self._attempts[place] = tl.apply(before, message, self._zero_s)
        if self._attempts[place] is not before:
            self._is_new()

    def over(self, stage_id: int, how: str) -> None:
        """The stage's process has ended."""
        place = self._latest.get(stage_id)
        if place is not None:
            self._attempts[place] = tl.ended(self._attempts[place], self._now_s(), how)
            self._is_new()

    def ready(self) -> None:
        """Every stage is ready for the first time."""
        boot_s = max((attempt.ready_s or 0.0 for attempt in self._attempts), default=0.0)
        self._note(state="ready", boot_s=boot_s)

    def failed(self, headline: str) -> None:
        """The first failure: everything stops."""
        self._note(state="failed", failure=headline)

    def close(self) -> None:
        """The run is over, and with it the timeline."""
        self._note(state="failed" if self._timeline.failure else "ended")
        if self._timer is not None:
            self._timer.cancel()

    def restore(self) -> None:
        """The runtime directory is a new, empty one."""
        self._write()

    def _note(self, **what: Any) -> None:
        self._timeline = replace(self._timeline, **what)
        self._write()

    def _is_new(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._pause_s, self._write_later)

    def _write_later(self) -> None:
        self._timer = None
        self._write()

    def _write(self) -> None:
        began_s = time.monotonic()
        timeline = replace(self._timeline, attempts=tuple(self._attempts), as_of_s=self._now_s())
        try:
            write_atomically(self._path, tl.to_text(timeline))
        except OSError as error:
            self._complain(f"cannot record the timeline in {self._path}: {error.strerror}")
        self._pause_s = max(WRITE_EVERY_S, (time.monotonic() - began_s) / WRITE_SHARE)

    def _complain(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._say(text)

    def _now_s(self) -> float:
        return self._loop.time() - self._zero_s

    def _forget_old_restarts(self) -> None:
        boot_s = self._timeline.boot_s
        if boot_s is None:
            return
        restarts = [i for i, attempt in enumerate(self._attempts) if attempt.spawned_s >= boot_s]
        # Not the present process of a stage that was restarted long ago: more is to be heard of it.
        oldest = next((i for i in restarts if i not in self._latest.values()), None)
        if oldest is None or len(restarts) < KEPT_RESTARTS:
            return
        del self._attempts[oldest]
        self._latest = {stage: place - (place > oldest) for stage, place in self._latest.items()}
