"""The supervisor's loop: turns what processes do into events for ``core.launch`` and its commands into deeds.

Decides nothing about order, failure or stopping. Single-threaded: everything runs on one asyncio loop, in the main
thread, because a child's parent-death signal is tied to the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from signal import SIGKILL, SIGTERM
from typing import Any

from stagelaunch.core import board, events, launch
from stagelaunch.core import messages as m
from stagelaunch.core.board import StageView, Timeouts
from stagelaunch.core.errors import ExitCode
from stagelaunch.core.events import EventKind, News
from stagelaunch.core.failure import StageFailure, exited
from stagelaunch.core.launch import LaunchResult, LaunchState
from stagelaunch.core.ledger import correction_bytes
from stagelaunch.core.narrate import narrate
from stagelaunch.core.phases import Phase
from stagelaunch.core.run_spec import StageRun, runs_to_json
from stagelaunch.core.units import format_size
from stagelaunch.supervisor import corrections
from stagelaunch.supervisor.runtime import Runtime, write_atomically
from stagelaunch.supervisor.stage_process import StageProcess
from stagelaunch.system import log_file
from stagelaunch.system.process import signal_name

PROBE_TIMEOUT_S = 60.0
KILL_WAIT_S = 10.0
"""How long the kernel gets to remove what was killed."""
LOG_TAIL_LINES = 20


@dataclass
class _Stage:
    """What the supervisor holds for one stage."""

    run: StageRun
    process: StageProcess | None = None
    view: StageView | None = None
    deadline: asyncio.TimerHandle | None = None
    probes: dict[int, asyncio.Future[m.Probed]] = field(default_factory=dict)
    told_failure: bool = False
    log_begins: log_file.Mark = field(default_factory=dict)
    """Where this run begins in the stage's log, which earlier runs have written to."""
    past_pids: set[int] = field(default_factory=set)
    """Its processes before the present one: it was started again."""


class Supervisor:
    """Boots the stages of one admitted deployment and keeps watching them until all are gone."""

    def __init__(
        self,
        runs: tuple[StageRun, ...],
        policy: launch.LaunchPolicy,
        timeouts: Timeouts,
        runtime: Runtime,
        say: Callable[[str], None],
        on_ready: Callable[[], None],
        on_event: Callable[[News], None] = lambda _: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._stages = {run.stage_id: _Stage(run) for run in runs}
        self._timeouts = timeouts
        self._runtime = runtime
        self._say = say
        self._on_ready = on_ready
        self._on_event = on_event
        self._state: LaunchState = launch.initial_state(policy)
        self._finished: asyncio.Future[LaunchResult] = self._loop.create_future()
        self._wake: asyncio.TimerHandle | None = None
        self._request_ids = itertools.count(1)
        self.began_s = self._loop.time()
        self.ready_at_s: float | None = None

    async def run(self) -> LaunchResult:
        """Boot, watch, stop. Returns when every stage is over or given up."""
        self._loop.set_exception_handler(self._on_bug)
        boot_deadline = self._loop.call_at(self.began_s + self._timeouts.boot_s, self._boot_is_late)
        try:
            self._dispatch(launch.Begin(self._loop.time()))
            return await self._finished
        except BaseException:
            # Our bug, or a cancelled task: the launch cannot be trusted to stop what it started.
            await self._kill_all()
            raise
        finally:
            boot_deadline.cancel()
            for stage in self._stages.values():
                self._cancel_deadline(stage)

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in one of our callbacks: the launch cannot be trusted any more, so nothing may survive it."""
        error = context.get("exception")
        if not isinstance(error, Exception) or self._finished.done():
            loop.default_exception_handler(context)
            return
        self._finished.set_exception(error)

    async def _kill_all(self) -> None:
        """Kill every stage and wait until it is gone, as long as a kill may take."""
        processes = [stage.process for stage in self._stages.values() if stage.process is not None]
        for process in processes:
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT_S):
                for process in processes:
                    await process.ended.wait()

    def request_stop(self, reason: str, *, again: bool = True, now: bool = False) -> None:
        """Stop in good order; ``now``: kill at once. A repeated request means now, unless ``again`` is False."""
        self._say(f"stopping: {reason}")
        for _ in range(2 if now else 1):
            if again or now or self._state.stop_requests == 0:
                self._dispatch(launch.StopRequested(reason, self._loop.time()))

    @property
    def state(self) -> LaunchState:
        """Where the launch is."""
        return self._state

    def views(self) -> dict[int, StageView | None]:
        """What is known about each stage; None for one that was never started."""
        return {stage_id: stage.view for stage_id, stage in self._stages.items()}

    def pids(self) -> dict[int, int]:
        """The process of each stage that was started."""
        return {i: stage.process.pid for i, stage in self._stages.items() if stage.process is not None}

    def runs(self) -> tuple[StageRun, ...]:
        """What the stages' processes are told, as of now."""
        return tuple(stage.run for stage in self._stages.values())

    def tell(self, stage_id: int, message: m.Message) -> None:
        """Send the stage's process a message, if it has one."""
        process = self._stages[stage_id].process
        if process is not None:
            process.send(message)

    def gone_pids(self) -> set[int]:
        """The processes that were started and are dead."""
        started = (stage.process for stage in self._stages.values() if stage.process is not None)
        ended = {process.pid for process in started if process.ended.is_set()}
        return ended.union(*(stage.past_pids for stage in self._stages.values()))

    async def probe(self, stage_id: int) -> m.Probed:
        """One step of a ready stage through its graph, compared with eager. TimeoutError if it does not answer."""
        stage = self._stages[stage_id]
        assert stage.process is not None
        request_id = next(self._request_ids)
        answer = stage.probes[request_id] = self._loop.create_future()
        stage.process.send(m.Probe(request_id))
        try:
            return await asyncio.wait_for(answer, PROBE_TIMEOUT_S)
        finally:
            del stage.probes[request_id]

    def _dispatch(self, event: launch.Event) -> None:
        was, (self._state, commands) = self._state.mode, launch.step(self._state, event)
        if self._state.mode is launch.Mode.STOPPING and was is not launch.Mode.STOPPING:
            self._on_event(News(EventKind.STOPPING, more={"reason": self._why_stopping()}))
        for command in commands:
            self._perform(command)
        if self._state.is_ready and self.ready_at_s is None:
            self.ready_at_s = self._loop.time()
            self._on_event(News(EventKind.READY, more={"boot_s": self.ready_at_s - self.began_s}))
            self._on_ready()

    def _perform(self, command: launch.Command) -> None:
        match command:
            case launch.StartStage(stage_id):
                self._start(self._stages[stage_id])
            case launch.AskStage(stage_id):
                self._enter_stop(stage_id, lambda process: process.send(m.Stop()))
            case launch.TerminateStage(stage_id):
                self._enter_stop(stage_id, StageProcess.terminate)
            case launch.KillStage(stage_id):
                if self._state.mode is launch.Mode.STOPPING:
                    self._say_of(self._stages[stage_id], "is still there: killing it")
                self._enter_stop(stage_id, StageProcess.kill)
            case launch.WakeAt(at_s):
                if self._wake is not None:
                    self._wake.cancel()
                self._wake = self._loop.call_at(at_s, self._time_passed)
            case launch.Finished(result):
                if self._wake is not None:
                    self._wake.cancel()
                self._finished.set_result(result)

    def _time_passed(self) -> None:
        self._dispatch(launch.TimePassed(self._loop.time()))

    def _start(self, stage: _Stage) -> None:
        run = stage.run
        if stage.process is not None:
            stage.past_pids.add(stage.process.pid)
        stage.process, stage.told_failure = None, False
        stage.view = board.spawned(run.stage_id, run.name, self._loop.time())
        stage.log_begins = log_file.mark(run.log_path)
        try:
            stage.process = StageProcess(
                self._runtime.run_file,
                run.stage_id,
                run.name,
                lambda message: self._on_message(stage, message),
                lambda code: self._on_exit(stage, code),
            )
        except OSError as error:
            failure = self._failure(stage, type(error).__name__, f"cannot start its process: {error}")
            self._loop.call_soon(
                self._dispatch, launch.StageEnded(run.stage_id, self._as_first(stage, failure), self._loop.time())
            )
            return
        self._say_of(stage, f"started on device {run.device_index}")
        self._tell_of(stage, EventKind.STARTED, device=run.device_index)
        self._rearm(stage)

    def _on_message(self, stage: _Stage, message: m.Message) -> None:
        try:
            self._take(stage, message)
        except launch.IllegalEventError:
            raise
        except Exception as error:
            text = f"its process reported what makes no sense ({message!r}): {error!r}"[:1000]
            self._fail(stage, self._failure(stage, "protocol", text))

    def _take(self, stage: _Stage, message: m.Message) -> None:
        assert stage.view is not None
        stage_id, before = stage.run.stage_id, stage.view
        match message:
            case m.Probed(request_id) if request_id in stage.probes:
                stage.probes[request_id].set_result(message)
            case m.Failed():
                self._on_failed(stage, message)
            case _ if before.phase is not Phase.STOP:
                stage.view = board.apply(before, message)
                for line in narrate(before, stage.view, message):
                    self._say_of(stage, line)
                pid = None if stage.process is None else stage.process.pid
                for news in events.of_message(before, stage.view, message, pid):
                    self._on_event(news)
                self._rearm(stage)
        if isinstance(message, m.Ready):
            self._dispatch(launch.StageReady(stage_id, self._loop.time()))

    def _on_failed(self, stage: _Stage, message: m.Failed) -> None:
        stage.told_failure = True
        failure = self._failure(
            stage, message.error, message.text, phase=message.phase, traceback=message.traceback,
            exit_code=ExitCode(message.exit_code),
        )  # fmt: skip
        learnt = self._learn(stage, message)
        if message.retry and learnt and self._state.may_retry(stage.run.stage_id):
            self._say_of(stage, f"failed in {message.phase}: {message.text}")
            less = ", with less KV cache" if message.overshoot_bytes else ""
            self._say_of(stage, f"is started once more in a fresh process{less}")
            self._on_event(events.of_failure(failure))
            self._tell_of(stage, EventKind.RESTARTING, reason=failure.summary)
            found = self._as_first(stage, failure)
            self._dispatch(launch.StageNeedsRetry(stage.run.stage_id, found, self._loop.time()))
            return
        self._fail(stage, failure)

    def _learn(self, stage: _Stage, message: m.Failed) -> bool:
        """Keep for the stage's next process, and for the next boot, what this one was over.

        False where its next process could not be told.
        """
        if not message.overshoot_bytes:
            return True
        correction = stage.run.graphs_correction_bytes + correction_bytes(message.overshoot_bytes)
        stage.run = replace(stage.run, graphs_correction_bytes=correction)
        runs = tuple(each.run for each in self._stages.values())
        size = format_size(correction)
        self._say_of(stage, f"gets {size} less KV cache than estimated from now on")
        try:
            corrections.remember(self._runtime.corrections, runs)
        except OSError as error:
            self._say_of(stage, f"which cannot be kept for the next boot: {error.strerror}")
        try:
            write_atomically(self._runtime.run_file, runs_to_json(runs))
        except OSError as error:
            self._say_of(stage, f"which its next process cannot be told: {error.strerror}")
            return False
        return True

    def _fail(self, stage: _Stage, failure: StageFailure) -> None:
        self._say_of(stage, f"FAILED in {failure.phase}: {failure.summary}")
        self._on_event(events.of_failure(failure))
        self._cancel_deadline(stage)
        now_s = self._loop.time()
        self._dispatch(launch.StageFailed(stage.run.stage_id, self._as_first(stage, failure), now_s))

    def _as_first(self, stage: _Stage, failure: StageFailure) -> launch.Failure:
        return launch.Failure(stage.run.stage_id, failure, self._loop.time())

    def _on_exit(self, stage: _Stage, code: int) -> None:
        self._cancel_deadline(stage)
        for answer in stage.probes.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError(f"stage {stage.run.name} ended"))
        signal = signal_name(-code) if code < 0 else None
        assert stage.view is not None
        as_asked = stage.view.phase is Phase.STOP and -code in (0, SIGTERM, SIGKILL)
        failure = None
        if not stage.told_failure and not as_asked:
            failure = self._as_first(stage, story := self._failure(stage, *exited(code, signal)))
            self._on_event(events.of_failure(story))
        self._say_of(stage, f"ended ({signal or f'exit code {code}'})")
        self._tell_of(stage, EventKind.ENDED, exit_code=None if signal else code, signal=signal)
        self._dispatch(launch.StageEnded(stage.run.stage_id, failure, self._loop.time()))

    def _failure(
        self,
        stage: _Stage,
        error: str,
        text: str,
        *,
        phase: Phase | None = None,
        traceback: str = "",
        exit_code: ExitCode = ExitCode.STAGE_FAILED,
    ) -> StageFailure:
        assert stage.view is not None
        return StageFailure(
            stage=stage.run.name,
            phase=phase or stage.view.phase,
            error=error,
            text=text,
            elapsed_s=self._loop.time() - stage.view.spawned_s,
            exit_code=exit_code,
            pid=None if stage.process is None else stage.process.pid,
            traceback=traceback,
            log_path=str(stage.run.log_path),
            log_tail=log_file.tail(stage.run.log_path, LOG_TAIL_LINES, stage.log_begins),
        )

    def _enter_stop(self, stage_id: int, how: Callable[[StageProcess], None]) -> None:
        stage = self._stages[stage_id]
        self._cancel_deadline(stage)
        if stage.view is not None and stage.view.phase is not Phase.STOP:
            stage.view = board.stopping(stage.view, self._loop.time())
        # None when its process could not be started: its end is on the way.
        if stage.process is not None:
            how(stage.process)

    def _rearm(self, stage: _Stage) -> None:
        """Set the timer to the stage's next deadline; each message may move it."""
        self._cancel_deadline(stage)
        assert stage.view is not None
        due = board.next_deadline(stage.view, self._timeouts)
        if due is not None:
            stage.deadline = self._loop.call_at(due[0], self._is_late, stage, due[1])

    def _cancel_deadline(self, stage: _Stage) -> None:
        if stage.deadline is not None:
            stage.deadline.cancel()
            stage.deadline = None

    def _is_late(self, stage: _Stage, text: str) -> None:
        stage.told_failure = True
        self._fail(stage, self._failure(stage, "deadline", text))

    def _boot_is_late(self) -> None:
        if self._state.is_ready or self.ready_at_s is not None:
            return
        missing = ", ".join(
            f"{stage.run.name} ({'not started' if stage.view is None else f'in phase {stage.view.phase}'})"
            for stage in self._stages.values()
            if stage.view is None or stage.view.ready_at_s is None
        )
        text = f"boot not finished after {self._timeouts.boot_s:g}s (boot deadline); waited for {missing}"
        failure = StageFailure(None, None, "deadline", text, self._timeouts.boot_s, ExitCode.BOOT_DEADLINE)
        self._say(f"FAILED: {text}")
        self._on_event(events.of_failure(failure))
        now_s = self._loop.time()
        self._dispatch(launch.DeadlineExpired(launch.Failure(None, failure, now_s), now_s))

    def _why_stopping(self) -> str:
        first = self._state.first_failure
        if first is None:
            return str(self._state.stop_reason)
        return first.cause.headline() if isinstance(first.cause, StageFailure) else str(first.cause)

    def _tell_of(self, stage: _Stage, kind: EventKind, **more: Any) -> None:
        pid = None if stage.process is None else stage.process.pid
        self._on_event(News(kind, stage.run.name, pid, more))

    def _say_of(self, stage: _Stage, text: str) -> None:
        pid = "" if stage.process is None else f" (pid {stage.process.pid})"
        self._say(f"{stage.run.name}{pid}: {text}")
