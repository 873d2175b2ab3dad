"""The supervisor's loop: turns what processes do into events for ``core.launch`` and its commands into deeds.

Decides nothing about order, failure, restarts or stopping. Single-threaded: everything runs on one asyncio loop, in the
main thread, because a child's parent-death signal is tied to the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM
from typing import Any

from stagelaunch.core import board, events, launch
from stagelaunch.core import messages as m
from stagelaunch.core.board import Due, Timeouts
from stagelaunch.core.errors import ExitCode, StagelaunchError
from stagelaunch.core.events import EventKind, News
from stagelaunch.core.failure import StageFailure
from stagelaunch.core.launch import LaunchResult, LaunchState
from stagelaunch.core.narrate import FINAL_TEXT, late_boot_text, narrate, restart_text, stop_text, used_up_text
from stagelaunch.core.phases import Phase
from stagelaunch.core.restarts import RestartBudget
from stagelaunch.core.run_spec import StageRun
from stagelaunch.core.stop_plan import KILL_WAIT_S
from stagelaunch.supervisor.forkserver import Forkservers
from stagelaunch.supervisor.lessons import Lessons
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.supervisor.stage import Stage, Stages
from stagelaunch.supervisor.stage_process import Listener, StageProcess
from stagelaunch.supervisor.timeline import TimelineRecorder
from stagelaunch.supervisor.watch import Watch
from stagelaunch.system import log_file
from stagelaunch.system.process import signal_name

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PROBE_TIMEOUT_S = 60.0
"""Or the phase deadline, if that is shorter: a probe is work like any other."""


@dataclass(frozen=True)
class Hooks:
    """Who is told what, and asked what, while stages run."""

    say: Callable[[str], None]
    """One line for people."""
    on_ready: Callable[[], None]
    """Every stage is ready for the first time."""
    on_failure: Callable[[StageFailure], None]
    """The first failure: everything stops now."""
    on_stopping: Callable[[], None]
    """Everything stops now, for whatever reason."""
    on_event: Callable[[News], None]
    """Something happened, for programs."""
    readmit: Callable[[int], Awaitable[None]]
    """Returns when the stage, which is to be started again, fits; raises StagelaunchError when it does not."""
    timeline: TimelineRecorder
    begin_log: Callable[[int], None]
    """The stage is about to be started: whatever its log says after this is of its new process."""


class Supervisor:
    """Boots the stages of one admitted deployment and keeps watching them until all are gone."""

    def __init__(
        self,
        runs: tuple[StageRun, ...],
        policy: launch.LaunchPolicy,
        timeouts: Timeouts,
        runtime: Runtime,
        hooks: Hooks,
        *,
        preload: bool = True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.stages = Stages(runs)
        self._timeouts = timeouts
        self._runtime = runtime
        self._hooks = hooks
        self._say = hooks.say
        self._lessons = Lessons(runtime, self.stages, self._say_of)
        self._state: LaunchState = launch.initial_state(policy)
        self._finished: asyncio.Future[LaunchResult] = self._loop.create_future()
        self._wake: asyncio.TimerHandle | None = None
        self._watch = Watch(self.stages, timeouts, self._on_late)
        self._forkservers = Forkservers(runs, runtime.imports_log, hooks.say, preload=preload)
        self._admissions: set[asyncio.Task[None]] = set()
        self._request_ids = itertools.count(1)
        self.began_s = self._loop.time()
        self.ready_at_s: float | None = None
        self._told_no_room = False

    async def run(self) -> LaunchResult:
        """Boot, watch, stop. Returns when every stage is over or given up."""
        self._loop.set_exception_handler(self._on_bug)
        boot_deadline = self._loop.call_at(self.began_s + self._timeouts.boot_s, self._boot_is_late)
        try:
            self._dispatch(launch.Begin(self._loop.time()))
            self._watch.start()
            return await self._finished
        except BaseException:
            # Our bug, or a cancelled task: the launch cannot be trusted to stop what it started.
            await self._kill_all()
            raise
        finally:
            boot_deadline.cancel()
            self._watch.close()
            if self._wake is not None:
                self._wake.cancel()
            for task in self._admissions:
                task.cancel()
            self._forkservers.close()

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in one of our callbacks: the launch cannot be trusted any more, so nothing may survive it."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_ROOM and "socket" in context:
            # Of accept, which is tried again by itself.
            if not self._told_no_room:
                self._say(f"cannot take a connection to its control socket: {error.strerror}; trying again")
            self._told_no_room = True
            return
        if not isinstance(error, Exception) or self._finished.done():
            loop.default_exception_handler(context)
            return
        self._finished.set_exception(error)

    async def _kill_all(self) -> None:
        """Kill every stage and wait until it is gone, as long as a kill may take."""
        processes = [stage.process for stage in self.stages if stage.process is not None]
        for process in processes:
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT_S):
                for process in processes:
                    await process.ended.wait()

    # What others may ask of it.

    def request_stop(self, reason: str, *, again: bool = True, now: bool = False) -> None:
        """Stop in good order; ``now``: kill at once. A repeated request means now, unless ``again`` is False."""
        hurry = now or (again and self._state.stop_requests > 0)
        self._say(f"stopping{' now' if hurry else ''}: {reason}")
        for _ in range(2 if now else 1):
            if again or now or self._state.stop_requests == 0:
                self._dispatch(launch.StopRequested(reason, self._loop.time()))

    def request_restart(self, name: str) -> str | None:
        """Stop this stage in good order and start it again; why not, where that cannot be."""
        stage = self.stages.named(name)
        if stage is None:
            return f"there is no stage {name}; it has {', '.join(stage.run.name for stage in self.stages)}"
        state = self._state.stages[stage.run.stage_id]
        may = (launch.StageState.READY, launch.StageState.COOLING)
        if self._state.mode is not launch.Mode.RUNNING or not self._state.was_ready or state not in may:
            return f"stage {name} is {state}; only a stage that has booted can be restarted"
        self._say_of(stage, "is restarted: asked by `stagelaunch restart`")
        self._tell_of(stage, EventKind.RESTARTING, reason="asked by `stagelaunch restart`")
        self._dispatch(launch.RestartRequested(stage.run.stage_id, self._loop.time()))
        return None

    def take_over(self, ladder: launch.StopLadder, restarts: RestartBudget | None, timeouts: Timeouts) -> None:
        """Go on under other rules."""
        self._state = launch.with_rules(self._state, ladder, restarts)
        self._timeouts = timeouts
        self._watch.start(timeouts)

    def device_failed(self, stage_ids: tuple[int, ...], text: str) -> None:
        """The device of these stages is lost."""
        for stage_id in stage_ids:
            stage = self.stages[stage_id]
            if stage.is_alive:
                stage.told_failure = True
                self._fail(stage, stage.failure("device", text, self._loop.time()))

    @property
    def state(self) -> LaunchState:
        """Where the launch is."""
        return self._state

    async def probe(self, stage_id: int) -> m.Probed:
        """One step of a ready stage through its graph, compared with eager. TimeoutError if it does not answer.

        Whoever asks may go away: the stage is busy with it until it answers, or its time is over.
        """
        stage = self.stages[stage_id]
        assert stage.process is not None
        request_id = next(self._request_ids)
        answer = stage.probes[request_id] = self._loop.create_future()
        # An answer that nobody waits for any more is no error.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._loop.call_later(min(PROBE_TIMEOUT_S, self._timeouts.phase_s), stage.end_probe, request_id, TimeoutError())
        stage.process.send(m.Probe(request_id))
        return await asyncio.shield(answer)

    # Events in, commands out.

    def _dispatch(self, event: launch.Event) -> None:
        before = self._state
        self._state, commands = launch.step(before, event)
        # Deeds before words: stages are told to stop before anybody is told why.
        for command in commands:
            self._perform(command)
        self._tell_changes(before)
        if self._state.is_ready and self.ready_at_s is None:
            self.ready_at_s = self._loop.time()
            self._hooks.on_event(News(EventKind.READY, more={"boot_s": self.ready_at_s - self.began_s}))
            self._hooks.on_ready()
            self._lessons.keep()
        elif self._state.is_ready and not before.is_ready:
            self._hooks.on_event(News(EventKind.READY))
            self._say("every stage is ready again")
            self._lessons.keep()

    def _tell_changes(self, before: LaunchState) -> None:
        now = self._state
        for stage_id, granted in now.restarts.items():
            if granted != before.restarts.get(stage_id, ()):
                stage = self.stages[stage_id]
                self._say_of(stage, restart_text(now, stage_id, self._loop.time()))
                self._tell_of(stage, EventKind.RESTARTING, reason="it failed", restart=len(granted))
        first, allowed = now.first_failure, now.policy.restarts
        if first is not None and before.first_failure is None and isinstance(first.cause, StageFailure):
            self._hooks.on_failure(first.cause)
            if allowed and first.stage_id is not None and before.was_ready:
                stage = self.stages[first.stage_id]
                if first.is_final:
                    self._say_of(stage, FINAL_TEXT)
                elif before.restart_at(first.stage_id, first.at_s) is None:
                    self._say_of(stage, used_up_text(allowed))
        if now.mode is launch.Mode.STOPPING and before.mode is not launch.Mode.STOPPING:
            self._hooks.on_event(News(EventKind.STOPPING, more={"reason": stop_text(now)}))
            self._hooks.on_stopping()

    def _perform(self, command: launch.Command) -> None:
        match command:
            case launch.StartStage(stage_id):
                self._start(self.stages[stage_id])
            case launch.AdmitStage(stage_id):
                self._admit(self.stages[stage_id])
            case launch.AskStage(stage_id):
                self._enter_stop(stage_id, StageProcess.ask_to_stop)
            case launch.TerminateStage(stage_id):
                self._enter_stop(stage_id, StageProcess.terminate)
            case launch.KillStage(stage_id):
                if not self._is_retried(stage_id):
                    is_late = self._state.stop_requests < 2
                    self._say_of(self.stages[stage_id], "is still there: killing it" if is_late else "killing it")
                self._enter_stop(stage_id, StageProcess.kill)
            case launch.WakeAt(at_s):
                if self._wake is not None:
                    self._wake.cancel()
                self._wake = self._loop.call_at(at_s, self._time_passed)
            case launch.Finished(result):
                self._finished.set_result(result)

    def _is_retried(self, stage_id: int) -> bool:
        return self._state.stages[stage_id] is launch.StageState.RETRYING

    def _time_passed(self) -> None:
        self._dispatch(launch.TimePassed(self._loop.time()))

    def _start(self, stage: Stage) -> None:
        run = stage.run
        if stage.pid is not None:
            stage.past_pids.add(stage.pid)
        stage.process, stage.told_failure = None, False
        stage.view = board.spawned(run.stage_id, run.name, self._loop.time())
        self._hooks.begin_log(run.stage_id)
        stage.log_begins = log_file.mark(run.log_path)
        self._hooks.timeline.started(run, stage.view.spawned_s)
        listener = Listener(
            on_message=lambda message: self._on_message(stage, message),
            on_started=lambda: self._on_started(stage),
            on_exit=lambda code: self._on_exit(stage, code),
            on_failed=lambda why: self._on_no_start(stage, why),
        )
        try:
            stage.process = StageProcess(self._forkservers, run, self._runtime.run_file, listener, self._runtime.run)
        except OSError as error:
            self._loop.call_soon(self._on_no_start, stage, str(error))
            return
        self._watch.rearm(stage)

    def _on_started(self, stage: Stage) -> None:
        assert stage.pid is not None
        self._hooks.timeline.runs(stage.run.stage_id, stage.pid)
        self._say_of(stage, f"started on device {stage.run.device_index}")
        self._tell_of(stage, EventKind.STARTED, device=stage.run.device_index)

    def _on_no_start(self, stage: Stage, why: str) -> None:
        failure = stage.failure("OSError", f"cannot start its process: {why}", self._loop.time())
        self._ended(stage, failure)

    def _admit(self, stage: Stage) -> None:
        stage.view = board.spawned(stage.run.stage_id, stage.run.name, self._loop.time())
        task = self._loop.create_task(self._readmit(stage))
        self._admissions.add(task)
        task.add_done_callback(self._admissions.discard)

    async def _readmit(self, stage: Stage) -> None:
        stage_id = stage.run.stage_id
        try:
            await self._hooks.readmit(stage_id)
        except StagelaunchError as error:
            failure = stage.failure("admission", f"cannot be started again: {error}", self._loop.time())
            self._say_of(stage, f"FAILED in its restart: {failure.summary}")
            self._hooks.on_event(events.of_failure(failure))
            self._dispatch(launch.StageRefused(stage_id, self._as_first(stage, failure), self._loop.time()))
        except Exception as error:
            self._on_bug(self._loop, {"exception": error, "message": "readmission"})
        else:
            self._dispatch(launch.StageAdmitted(stage_id, self._loop.time()))

    # What stages say and do.

    def _on_message(self, stage: Stage, message: m.Message) -> None:
        try:
            self._take(stage, message)
        except launch.IllegalEventError:
            raise
        except Exception as error:
            text = f"its process reported what makes no sense ({message!r}): {error!r}"[:1000]
            self._fail(stage, stage.failure("protocol", text, self._loop.time()))

    def _take(self, stage: Stage, message: m.Message) -> None:
        assert stage.view is not None
        stage_id = stage.run.stage_id
        before = stage.view = board.heard(stage.view, self._loop.time())
        self._hooks.timeline.heard(stage_id, message)
        match message:
            case m.Probed(request_id):
                stage.end_probe(request_id, message)
            case m.Failed():
                self._on_failed(stage, message)
            case _ if before.phase is not Phase.STOP:
                stage.view = board.apply(before, message)
                for line in narrate(before, stage.view, message):
                    self._say_of(stage, line)
                pid = stage.pid
                for news in events.of_message(before, stage.view, message, pid):
                    self._hooks.on_event(news)
                self._watch.rearm(stage)
        if isinstance(message, m.Ready):
            self._dispatch(launch.StageReady(stage_id, self._loop.time()))

    def _on_failed(self, stage: Stage, message: m.Failed) -> None:
        stage.told_failure = True
        failure = stage.reported(message, self._loop.time())
        differently = self._lessons.learn(stage, message)
        if differently is not None and self._state.may_retry(stage.run.stage_id):
            self._say_of(stage, f"failed in {message.phase}: {message.text}")
            self._say_of(stage, f"is started once more in a fresh process{differently}")
            self._hooks.on_event(events.of_failure(failure))
            self._tell_of(stage, EventKind.RESTARTING, reason=failure.summary)
            found = self._as_first(stage, failure)
            self._dispatch(launch.StageNeedsRetry(stage.run.stage_id, found, self._loop.time()))
            return
        self._fail(stage, failure)

    def _fail(self, stage: Stage, failure: StageFailure) -> None:
        self._say_of(stage, f"FAILED in {failure.phase}: {failure.summary}")
        self._hooks.on_event(events.of_failure(failure))
        stage.cancel_timers()
        now_s = self._loop.time()
        self._dispatch(launch.StageFailed(stage.run.stage_id, self._as_first(stage, failure), now_s))

    def _as_first(self, stage: Stage, failure: StageFailure) -> launch.Failure:
        # What is wrong with the config or the checkpoint stays so.
        is_final = failure.exit_code is ExitCode.CONFIG
        return launch.Failure(stage.run.stage_id, failure, self._loop.time(), is_final)

    def _on_exit(self, stage: Stage, code: int | None) -> None:
        stage.drop_probes()
        assert stage.view is not None
        as_asked = code is None or (stage.view.phase is Phase.STOP and -code in (0, SIGTERM, SIGKILL))
        failure = None
        if code is not None and not stage.told_failure and not as_asked:
            failure = stage.death(code, self._loop.time())
            self._hooks.on_event(events.of_failure(failure))
        stage.cancel_timers()
        signal = signal_name(-code) if code is not None and code < 0 else None
        how = "not started" if code is None else signal or f"exit code {code}"
        self._hooks.timeline.over(stage.run.stage_id, how)
        self._say_of(stage, "was not started" if code is None else f"ended ({how})")
        self._tell_of(stage, EventKind.ENDED, exit_code=None if signal else code, signal=signal)
        self._ended(stage, failure)

    def _ended(self, stage: Stage, failure: StageFailure | None) -> None:
        found = None if failure is None else self._as_first(stage, failure)
        self._dispatch(launch.StageEnded(stage.run.stage_id, found, self._loop.time()))

    def _enter_stop(self, stage_id: int, how: Callable[[StageProcess], None]) -> None:
        stage = self.stages[stage_id]
        stage.cancel_timers()
        if stage.view is not None and stage.view.phase is not Phase.STOP:
            stage.view = board.stopping(stage.view, self._loop.time())
        # None when its process could not be started: its end is on the way.
        if stage.process is not None:
            how(stage.process)

    # Deadlines.

    def _on_late(self, stage: Stage, due: Due) -> None:
        stage.told_failure = True
        text = due.text
        if stage.pid is None:
            text += f"; its libraries are still being imported; see {self._runtime.imports_log}"
        self._fail(stage, stage.failure(due.kind, text, self._loop.time()))

    def _boot_is_late(self) -> None:
        if self._state.is_ready or self.ready_at_s is not None:
            return
        views = {stage.run.name: stage.view for stage in self.stages}
        text = late_boot_text(views, self._timeouts.boot_s)
        failure = StageFailure(None, None, "deadline", text, self._timeouts.boot_s, ExitCode.BOOT_DEADLINE)
        self._say(f"FAILED: {text}")
        self._hooks.on_event(events.of_failure(failure))
        now_s = self._loop.time()
        self._dispatch(launch.DeadlineExpired(launch.Failure(None, failure, now_s), now_s))

    def _tell_of(self, stage: Stage, kind: EventKind, **more: Any) -> None:
        self._hooks.on_event(News(kind, stage.run.name, stage.pid, more))

    def _say_of(self, stage: Stage, text: str) -> None:
        pid = "" if stage.pid is None else f" (pid {stage.pid})"
        self._say(f"{stage.run.name}{pid}: {text}")
