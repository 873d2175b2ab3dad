"""What the stages of a run teach while they boot, kept for their next process and for the next boot.

Writes two files: the run file, which tells the next process of a stage, and what is remembered. Decides by
``core.remembered``; whether a stage is started once more is ``core.launch``'s business. Used by
``supervisor.supervisor`` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stagelaunch.core import messages as m
from stagelaunch.core.ledger import correction_bytes
from stagelaunch.core.phases import Phase
from stagelaunch.core.remembered import BY_PLAN, measured
from stagelaunch.core.run_spec import runs_to_json
from stagelaunch.core.units import format_size
from stagelaunch.supervisor.remembered import remember
from stagelaunch.supervisor.runtime import Runtime, write_atomically
from stagelaunch.supervisor.stage import Stage, Stages


class Lessons:
    """Of all stages of one run, whose ``run`` it replaces."""

    def __init__(self, runtime: Runtime, stages: Stages, say_of: Callable[[Stage, str], None]) -> None:
        self._runtime = runtime
        self._stages = stages
        self._say_of = say_of

    def learn(self, stage: Stage, message: m.Failed) -> str | None:
        """What a stage's failure teaches: how its next process will differ, to follow "is started once more".

        None where another process would be of no use, or could not be told.
        """
        if stage.run.plan is not None and message.phase in BY_PLAN:
            stage.run = replace(stage.run, remembered=None)
            self._remember(stage, "that its plan did not hold")
            return ", and measures" if self._tell_next(stage) else None
        if message.phase is Phase.SIZE and stage.run.graphs_correction_bytes:
            # No boot would ever get as far as to find it wrong.
            stage.run = replace(stage.run, graphs_correction_bytes=0)
            self._remember(stage, "that its graphs are not taken to be larger than estimated any more")
            return ", with its graphs as estimated" if self._tell_next(stage) else None
        if message.overshoot_bytes:
            correction = stage.run.graphs_correction_bytes + correction_bytes(message.overshoot_bytes)
            stage.run = replace(stage.run, graphs_correction_bytes=correction)
            self._say_of(stage, f"gets {format_size(correction)} less KV cache than estimated from now on")
            self._remember(stage, "which")
            if not self._tell_next(stage):
                return None
        less = ", with less KV cache" if message.overshoot_bytes else ""
        return less if message.retry else None

    def keep(self) -> None:
        """Every stage is ready: keep what each has measured."""
        last = None
        for stage in self._stages:
            if stage.view is None or stage.view.ledger is None or not measured(stage.view.ledger):
                continue
            if stage.run.remembered != stage.view.ledger:
                stage.run = replace(stage.run, remembered=stage.view.ledger)
                last = stage
        if last is None:
            return
        self._remember(last, "what was measured")
        if last.run.reuse_plan:
            self._tell_next(last)

    def _remember(self, stage: Stage, what: str) -> None:
        try:
            remember(self._runtime.remembered, self._stages.runs())
        except OSError as error:
            self._say_of(stage, f"{what} cannot be kept for the next boot: {error.strerror}")

    def _tell_next(self, stage: Stage) -> bool:
        try:
            write_atomically(self._runtime.run_file, runs_to_json(self._stages.runs()))
        except OSError as error:
            self._say_of(stage, f"its next process cannot be told: {error.strerror}")
            return False
        return True
