"""What the supervisor holds for each stage: its process, what is known of it, its timers, and how a failure is told.

Decides nothing. The supervisor's, who shows it to what it is made of and to its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stagelaunch.core import messages as m
from stagelaunch.core.board import Due, StageView
from stagelaunch.core.errors import ExitCode
from stagelaunch.core.failure import StageFailure, exited
from stagelaunch.core.phases import Phase
from stagelaunch.core.run_spec import StageRun
from stagelaunch.supervisor.stage_process import StageProcess
from stagelaunch.system import log_file
from stagelaunch.system.process import signal_name

LOG_TAIL_LINES = 20
STACKS_ANSWER_S = 2.0
"""A stage that nothing is wrong with, as far as is known, gets long to write its stacks by itself."""


@dataclass
class Stage:
    """One stage of a running deployment, through all its processes."""

    run: StageRun
    process: StageProcess | None = None
    view: StageView | None = None
    deadline: asyncio.TimerHandle | None = None
    verdict: tuple[asyncio.TimerHandle, Due] | None = None
    """It is late; its stacks are being collected before that is told."""
    probes: dict[int, asyncio.Future[m.Probed]] = field(default_factory=dict)
    told_failure: bool = False
    log_begins: log_file.Mark = field(default_factory=dict)
    """Where this run begins in the stage's log, which earlier runs have written to."""
    past_pids: set[int] = field(default_factory=set)
    """Its processes before the present one: it was started again."""

    @property
    def is_alive(self) -> bool:
        """It has a process that has not ended."""
        return self.process is not None and not self.process.ended.is_set()

    @property
    def pid(self) -> int | None:
        """Of its process, also when that has ended; None when it has none, or not yet."""
        return None if self.process is None else self.process.pid

    @property
    def answers(self) -> bool:
        """Whether it can be expected to answer a ping now."""
        assert self.view is not None or not self.is_alive
        return self.is_alive and self.view is not None and self.view.phase not in (Phase.SPAWN, Phase.STOP)

    def dump_stacks(self, answer_s: float) -> bool:
        """Have the stacks of its threads written to its log, or those of the import to that log; False when there is
        nobody to do it. ``answer_s``: see ``StageProcess.dump_stacks``."""
        if self.process is None or not (self.answers or self.pid is None):
            return False
        self.process.dump_stacks(answer_s)
        return True

    def cancel_timers(self) -> None:
        """No deadline counts any more."""
        if self.deadline is not None:
            self.deadline.cancel()
        if self.verdict is not None:
            self.verdict[0].cancel()
        self.deadline = self.verdict = None

    def drop_probes(self) -> None:
        """Nobody is left to answer."""
        for request_id in tuple(self.probes):
            self.end_probe(request_id, ConnectionResetError(f"stage {self.run.name} ended"))

    def end_probe(self, request_id: int, outcome: m.Probed | Exception) -> None:
        """The probe is over, one way or the other; without effect if it was already."""
        answer = self.probes.pop(request_id, None)
        if answer is None or answer.done():
            return
        if isinstance(outcome, m.Probed):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)

    def failure(
        self,
        error: str,
        text: str,
        at_s: float,
        *,
        phase: Phase | None = None,
        traceback: str = "",
        exit_code: ExitCode = ExitCode.STAGE_FAILED,
        exit_status: int | None = None,
        signal: str | None = None,
    ) -> StageFailure:
        """A failure of the stage as it is told: with its phase, its process and its last words."""
        assert self.view is not None
        return StageFailure(
            stage=self.run.name,
            phase=phase or self.view.phase,
            error=error,
            text=text,
            elapsed_s=at_s - self.view.spawned_s,
            exit_code=exit_code,
            pid=self.pid,
            exit_status=exit_status,
            signal=signal,
            traceback=traceback,
            log_path=str(self.run.log_path),
            log_tail=log_file.tail(self.run.log_path, LOG_TAIL_LINES, self.log_begins),
        )

    def death(self, code: int, at_s: float) -> StageFailure:
        """The failure of a process that ended by itself: what it was late with, or the way it ended."""
        if self.verdict is not None:
            return self.failure(self.verdict[1].kind, self.verdict[1].text, at_s)
        signal = signal_name(-code) if code < 0 else None
        kind, text = exited(code, signal)
        return self.failure(kind, text, at_s, exit_status=None if signal else code, signal=signal)

    def reported(self, message: m.Failed, at_s: float) -> StageFailure:
        """The failure that its process told."""
        return self.failure(
            message.error, message.text, at_s, phase=message.phase, traceback=message.traceback,
            exit_code=ExitCode(message.exit_code),
        )  # fmt: skip


class Stages:
    """The stages of a deployment, by id, and what is known of all of them now."""

    def __init__(self, runs: Iterable[StageRun]) -> None:
        self._stages = {run.stage_id: Stage(run) for run in runs}

    def __getitem__(self, stage_id: int) -> Stage:
        return self._stages[stage_id]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages.values())

    def named(self, name: str) -> Stage | None:
        """The stage of that name; None where there is none."""
        return next((stage for stage in self if stage.run.name == name), None)

    def runs(self) -> tuple[StageRun, ...]:
        """What their processes are told."""
        return tuple(stage.run for stage in self)

    def views(self) -> dict[int, StageView | None]:
        """What is known about each; None for one that was never started."""
        return {stage_id: stage.view for stage_id, stage in self._stages.items()}

    def pids(self) -> dict[int, int]:
        """The process of each that was started."""
        return {i: stage.pid for i, stage in self._stages.items() if stage.pid is not None}

    def live_pids(self) -> dict[str, int]:
        """The processes that have not ended, by the name of their stage."""
        return {stage.run.name: stage.pid for stage in self if stage.pid is not None and stage.is_alive}

    def gone_pids(self) -> set[int]:
        """The processes that were started and are dead."""
        ended = {stage.pid for stage in self if stage.pid is not None and not stage.is_alive}
        return ended.union(*(stage.past_pids for stage in self))

    def tell(self, stage_id: int, message: m.Message) -> None:
        """Send the stage's process a message, if it has one."""
        process = self._stages[stage_id].process
        if process is not None:
            process.send(message)

    def dump_stacks(self) -> None:
        """Every stage writes the stacks of its threads to its log, and goes on; while libraries are imported for it,
        those of the import to that log."""
        for stage in self:
            stage.dump_stacks(STACKS_ANSWER_S)
