"""Sees to it that stages keep to their deadlines and answer: pings them, and finds the one that is late.

When a stage is late next is ``core.board``'s business; what follows is the supervisor's, which owns a ``Watch``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from stagelaunch.core import board
from stagelaunch.core import messages as m
from stagelaunch.core.board import Due, Timeouts
from stagelaunch.supervisor.stage import Stage, Stages

PINGS_PER_HEARTBEAT = 3
ANSWER_S = 0.2
"""How long a stage that is late has to write its stacks to its log by itself; then a signal has it do so."""
STACKS_S = 0.4
"""How long for both, before it is given up."""


class Watch:
    """``on_late`` is called from the loop, once for each time a stage is late."""

    def __init__(self, stages: Stages, timeouts: Timeouts, on_late: Callable[[Stage, Due], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stages = stages
        self._timeouts = timeouts
        self._on_late = on_late
        self._heartbeat: asyncio.TimerHandle | None = None
        self._ping_ids = itertools.count(1)

    def start(self, timeouts: Timeouts | None = None) -> None:
        """Begin, or go on under other deadlines."""
        self._timeouts = timeouts or self._timeouts
        self._beat()
        for stage in self._stages:
            if stage.is_alive:
                self.rearm(stage)

    def close(self) -> None:
        """No deadline counts any more."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        for stage in self._stages:
            stage.cancel_timers()

    def rearm(self, stage: Stage) -> None:
        """Set the timer to the stage's next deadline; each message may move it."""
        if stage.verdict is not None:
            return
        stage.cancel_timers()
        assert stage.view is not None
        due = board.next_deadline(stage.view, self._timeouts)
        if due is not None:
            stage.deadline = self._loop.call_at(due.at_s, self._is_late, stage, due)

    def _beat(self) -> None:
        """Ask every stage whether it is there; one that runs a probe has the probe's own deadline instead."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        now_s = self._loop.time()
        for stage in self._stages:
            if not stage.answers or stage.view is None or stage.process is None:
                continue
            if stage.probes:
                stage.view = board.heard(stage.view, now_s)
                self.rearm(stage)
            else:
                stage.process.send(m.Ping(next(self._ping_ids)))
        self._heartbeat = self._loop.call_later(self._timeouts.heartbeat_s / PINGS_PER_HEARTBEAT, self._beat)

    def _is_late(self, stage: Stage, due: Due) -> None:
        """It has failed; before that is told, its stacks are asked for: they show where it hangs."""
        wait_s = STACKS_S if stage.dump_stacks(ANSWER_S) else 0.0
        stage.verdict = (self._loop.call_later(wait_s, self._is_still_late, stage), due)

    def _is_still_late(self, stage: Stage) -> None:
        """Unless it has got on at the last moment."""
        assert stage.view is not None
        stage.verdict = None
        due = board.next_deadline(stage.view, self._timeouts)
        if due is None or due.at_s > self._loop.time():
            self.rearm(stage)
        else:
            self._on_late(stage, due)
