"""One run of one admitted deployment: its supervisor, control socket and signals, and what is looked at afterwards.

Decides nothing about stages (``core.launch`` does). Used by ``supervisor.run``, which may make another one after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from filelock import FileLock

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core import launch
from stagelaunch.core.errors import CheckpointError, NoDeviceError
from stagelaunch.core.events import EventKind, News
from stagelaunch.core.failure import StageFailure
from stagelaunch.core.inventory import DeviceInfo
from stagelaunch.core.launch_policy import launch_policy, timeouts
from stagelaunch.core.outcome import Outcome
from stagelaunch.core.reload import take_over
from stagelaunch.core.run_options import RunOptions
from stagelaunch.core.run_spec import runs_to_json
from stagelaunch.core.stop_plan import StopPlan, stop_plan
from stagelaunch.core.units import format_duration
from stagelaunch.supervisor.admission import Admitted, devices_now, readmit
from stagelaunch.supervisor.aftermath import memory_left, say_who_is_left
from stagelaunch.supervisor.control_service import ControlService
from stagelaunch.supervisor.control_socket import Handlers
from stagelaunch.supervisor.endings import ending, note_failure
from stagelaunch.supervisor.events import EventLog
from stagelaunch.supervisor.logs import StageLogs, put_aside_large
from stagelaunch.supervisor.look import Looks
from stagelaunch.supervisor.own_run import sweep_strays
from stagelaunch.supervisor.prefetch import Prefetch
from stagelaunch.supervisor.reload import reload_file
from stagelaunch.supervisor.runtime import Runtime, write_atomically
from stagelaunch.supervisor.service import ServiceNotifier
from stagelaunch.supervisor.stacks import STACK_LINES, dump_threads_on_quit
from stagelaunch.supervisor.status import deployment_state, health_body, stage_bodies, status_body
from stagelaunch.supervisor.supervisor import Hooks, Supervisor
from stagelaunch.supervisor.timeline import TimelineRecorder
from stagelaunch.supervisor.weight_plans import write_plans
from stagelaunch.system import log_file, tree
from stagelaunch.system.locks import LockDirectory, sweep
from stagelaunch.weights.files import require_unchanged

WEIGHTS_LOOK_S = 5.0
"""How long whoever asks for a restart waits for the disk: less than `stagelaunch restart` waits for its answer."""
STATUS_DRIVER_S = 5.0
"""How long `status` waits for the driver: less than its caller waits for `status`."""


@dataclass(frozen=True)
class Listener:
    """Who is told what, while a deployment runs."""

    say: Callable[[str], None]
    """One line for people."""
    on_started: Callable[[], None]
    """The control socket answers; stages are about to be spawned."""
    on_ready: Callable[[dict[str, Any]], None]
    """Every stage is ready; the status as of now."""
    show: Callable[[str], bool] | None = None
    """One line of a stage's log, for people; False when it would have to wait. None: they are not shown."""
    reopen: Callable[[], None] = lambda: None
    """Open anew by its name whatever log what is said goes to (SIGUSR1)."""
    on_owned: Callable[[], None] = lambda: None
    """The deployment is this run's: no other runs."""


class Session:
    """One run. ``run`` is called once."""

    def __init__(
        self,
        loaded: LoadedDeployment,
        admitted: Admitted,
        runtime: Runtime,
        lock: FileLock,
        lock_dir: LockDirectory,
        listener: Listener,
        events: EventLog,
        options: RunOptions,
        service: ServiceNotifier,
    ) -> None:
        self.loaded = loaded
        """The config, as it was reloaded last."""
        self._deployment = admitted.deployment
        self._admitted = admitted
        self._runtime = runtime
        self._lock = lock
        self._lock_dir = lock_dir
        self._events = events
        self._service = service
        self._listener = listener
        self._say = listener.say
        self._options = options
        self._interrupted = False
        self.asked_to_stop = False
        """By anybody, also when every stage was over already."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks = Looks()
        self._prefetch = Prefetch.of(self._deployment, admitted.weight_plans)
        policy = launch_policy(self._deployment, self._stop_plan)
        self._timeline = TimelineRecorder(
            runtime.timeline, self._deployment.name, policy.order, policy.groups, listener.say
        )
        hooks = Hooks(
            self._say, self._on_ready, self._on_failure, self._on_stopping, events.add, self._readmit, self._timeline,
            lambda stage_id: self._logs.begin(stage_id),
        )  # fmt: skip
        # Or it would grow with every boot. One that cannot be put aside is written on.
        with contextlib.suppress(OSError):
            put_aside_large(runtime.imports_log, self._deployment.logs)
        self._supervisor = Supervisor(
            admitted.runs, policy, timeouts(self._deployment), runtime, hooks, preload=self._deployment.preload
        )
        paths = {run.stage_id: (run.name, run.log_path) for run in admitted.runs}
        self._logs = StageLogs(paths, self._deployment.logs, self._supervisor.stages.tell, listener.say, listener.show)

    @property
    def _stop_plan(self) -> StopPlan:
        return stop_plan(self._deployment.timeouts, ci=self._options.ci)

    async def run(self) -> Outcome:
        """Boot and watch until every stage is over, then look for what is left."""
        self._listen_to_signals()
        # A Ctrl-C that came just before has only marked this task as cancelled: let it end here, with nothing started.
        await asyncio.sleep(0)
        control = ControlService(self._runtime, self._lock, self._handlers(), self._say, self._restore_files)
        control.open()
        self._logs.start()
        outcome = None
        try:
            self._events.add(News(EventKind.BOOTING))
            self._prefetch.start()
            self._listener.on_started()
            self._service.booting(self._supervisor.stages.views, self._why_stopping)
            result = await self._supervisor.run()
            self._service.tick()
            outcome = self._outcome(result, await self._leftovers(result))
        finally:
            self._prefetch.stop()
            for task in self._tasks:
                task.cancel()
            self._timeline.close()
            self._sweep_locks()
            await self._logs.close()
            self._events.add(News(EventKind.ENDED, more=ending(outcome)))
            self._events.close()
            await control.close()
        return outcome

    def _outcome(self, result: launch.LaunchResult, leftovers: tuple[str, ...]) -> Outcome:
        return Outcome(
            first=_story(result.first_failure),
            consequences=tuple(story for f in result.consequences if (story := _story(f)) is not None),
            was_ready=result.was_ready,
            interrupted=self._interrupted,
            leftovers=leftovers,
        )

    def stages(self) -> list[dict[str, Any]]:
        """Each stage as `status` shows it: how far it came."""
        return stage_bodies(self._deployment, self._supervisor, time.monotonic())

    def _why_stopping(self) -> str | None:
        """For the service manager: None also where the deployment is going to be started again."""
        state = self._supervisor.state
        if state.mode not in (launch.Mode.STOPPING, launch.Mode.FINISHED):
            return None
        if self._deployment.on_failure == "restart-all" and state.was_ready and state.stop_requests == 0:
            return None
        story = _story(state.first_failure)
        return str(state.stop_reason) if story is None else story.headline()

    def _reload(self) -> None:
        """Take over what a changed file says and can be changed now, and print every difference."""
        self._service.reloading()
        self._say(f"reloading {self.loaded.path}")
        reloaded = reload_file(self.loaded.path, self.loaded.deployment)
        for line in reloaded.lines:
            self._say(f"  {line}")
        self.loaded = replace(self.loaded, deployment=reloaded.deployment)
        self._deployment = take_over(self._deployment, reloaded.deployment)
        policy = launch_policy(self._deployment, self._stop_plan)
        self._supervisor.take_over(policy.ladder, policy.restarts, timeouts(self._deployment))
        self._logs.take_over(self._deployment.logs)
        self._service.reloaded(self._deployment.timeouts)

    def _restore_files(self) -> None:
        """The runtime directory is a new, empty one: what commands and stages look for there."""
        write_plans(self._supervisor.stages.runs(), self._admitted.weight_plans)
        write_atomically(self._runtime.run_file, runs_to_json(self._supervisor.stages.runs()))
        self._runtime.write_state(deployment_state(self._supervisor))
        self._timeline.restore()
        self._reopen_logs()

    def _reopen_logs(self) -> None:
        self._listener.reopen()
        self._logs.reopen()

    def _sweep_locks(self) -> None:
        """A killed stage leaves its record beside the device lock; the lock itself went with it."""
        gone = self._supervisor.stages.gone_pids()
        for info in self._admitted.devices.values():
            sweep(self._lock_dir, info.uuid, gone)

    def _handlers(self) -> Handlers:
        return Handlers(
            status=self._status,
            down=lambda now: self._request_stop("asked by `stagelaunch down`", again=False, now=now),
            ready_stages=self._ready_stages,
            probe=self._supervisor.probe,
            health=lambda: health_body(self._deployment, self._supervisor, time.monotonic()),
            events=self._events,
            logs={run.name: run.log_path for run in self._admitted.runs},
            restart=self._request_restart,
        )

    # Signals.

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._request_stop, "SIGTERM")
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.add_signal_handler(signal.SIGUSR1, self._reopen_logs)
        dump_threads_on_quit(self._runtime.stacks, self._dump)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._request_stop("Ctrl-C")

    def _request_stop(self, reason: str, *, again: bool = True, now: bool = False) -> None:
        self.asked_to_stop = True
        self._supervisor.request_stop(reason, again=again, now=now)

    async def _request_restart(self, name: str) -> str | None:
        """Why the stage of that name is not started again; it is ended only if it can be."""
        stage_id = next((stage.id for stage in self._deployment.stages if stage.name == name), None)
        plan = None if stage_id is None else self._admitted.weight_plans.get(stage_id)
        if plan is not None:
            try:
                await self._looks.take(stage_id, lambda: require_unchanged(plan.stamps), WEIGHTS_LOOK_S)
            except CheckpointError as error:
                return str(error)
            except TimeoutError:
                within = f"within {format_duration(WEIGHTS_LOOK_S)}"
                return f"cannot look at its weights: the disk does not answer {within}; the stage runs on, try again"
            except RuntimeError as error:
                return f"cannot look at its weights: {error}; the stage runs on, try again"
        return self._supervisor.request_restart(name)

    def _dump(self) -> None:
        """The threads are written down; add the tasks, the state of every stage, and the stacks of the stages."""
        state = self._supervisor.state
        self._say(f"SIGQUIT: {deployment_state(self._supervisor)}; its threads, also in {self._runtime.stacks}:")
        for line in log_file.tail(self._runtime.stacks, STACK_LINES):
            self._say(f"  {line}")
        for task in asyncio.all_tasks():
            self._say(f"  task {task!r}"[:200])
        for stage_id, view in self._supervisor.stages.views().items():
            where = "never started" if view is None else f"in phase {view.phase} for {_since(view.phase_began_s)}"
            self._say(f"  stage {self._deployment.stage(stage_id).name}: {state.stages[stage_id]}, {where}")
        self._supervisor.stages.dump_stacks()
        self._say(f"  the stacks of the stages are in {self._runtime.logs}, of imports in {self._runtime.imports_log}")

    # What the supervisor tells and asks.

    def _on_ready(self) -> None:
        self._timeline.ready()
        self._prefetch.stop()
        self._begin(self._announce_ready())
        self._begin(self._watch_devices())

    async def _announce_ready(self) -> None:
        self._note_state("ready")
        self._service.ready()
        try:
            now = await self._devices_quickly()
        except NoDeviceError:
            # A driver that does not answer now takes nothing away from the stages being ready.
            now = {}
        self._listener.on_ready(self._status_of(now))

    def _on_failure(self, failure: StageFailure) -> None:
        # Also at the end, with what came of it; now, because the end may be long in coming.
        note_failure(self._runtime, self._deployment.name, failure)
        self._timeline.failed(failure.headline())

    def _on_stopping(self) -> None:
        self._prefetch.stop()
        self._note_state("stopping")
        self._begin(say_who_is_left(self._supervisor.stages.live_pids, self._devices_quickly, self._say))

    async def _readmit(self, stage_id: int) -> None:
        await readmit(self._admitted, stage_id, self._lock_dir, self._stop_plan.memory_s)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"internal error, going on: {error!r}")

    def _note_state(self, state: str) -> None:
        """The stages are ready whether or not that can be written down."""
        try:
            self._runtime.write_state(state)
        except OSError as error:
            self._say(f"cannot record the state in {self._runtime.state}: {error.strerror}")

    async def _status(self) -> dict[str, Any]:
        return self._status_of(await self._devices_quickly())

    def _status_of(self, now: dict[int, DeviceInfo]) -> dict[str, Any]:
        return status_body(self._deployment, self._supervisor, self._admitted.devices, now, time.monotonic())

    def _ready_stages(self) -> dict[str, int]:
        state = self._supervisor.state
        ready = state.ids({launch.StageState.READY})
        return {stage.name: stage.id for stage in self._deployment.stages if stage.id in ready}

    # Devices.

    async def _devices_quickly(self) -> dict[int, DeviceInfo]:
        return await self._devices_now(min(STATUS_DRIVER_S, self._deployment.timeouts.driver_s))

    async def _devices_now(self, timeout_s: float) -> dict[int, DeviceInfo]:
        return await devices_now(self._admitted.devices, self._deployment.backend, self._admitted.machine, timeout_s)

    async def _watch_devices(self) -> None:
        """A device that is twice in a row not there, or does not answer, is lost, and so are its stages.

        Asked for as often as a stage may be silent.
        """
        missed: frozenset[int] = frozenset()
        while True:
            await asyncio.sleep(self._deployment.timeouts.heartbeat_s)
            try:
                now = await self._devices_now(self._deployment.timeouts.driver_s)
            except NoDeviceError:
                now = {}
            absent = frozenset(self._admitted.devices) - frozenset(now)
            for index in sorted(absent & missed):
                on_it = tuple(stage.id for stage in self._deployment.stages if index in stage.device_indices)
                self._supervisor.device_failed(on_it, f"device {index} is not there any more, or does not answer")
            missed = absent

    # The end.

    async def _leftovers(self, result: launch.LaunchResult) -> tuple[str, ...]:
        """Processes that survived KILL, and device memory that did not come back in time."""
        pids = self._supervisor.stages.pids()
        stuck = [
            f"stage {self._deployment.stage(i).name}: {tree.describe_pid(pids[i])} survived SIGKILL"
            for i in result.abandoned
        ]
        stuck += await self._kill_strays(set(pids.values()))
        plan, driver_s = self._stop_plan, self._deployment.timeouts.driver_s
        missing = await memory_left(
            self._admitted.devices,
            {*pids.values(), *self._supervisor.stages.gone_pids()},
            self._deployment.memory_tolerance_bytes,
            plan.memory_s,
            lambda: self._devices_now(min(driver_s, plan.memory_s) if self._options.ci else driver_s),
            self._say,
        )
        return (*stuck, *missing)

    async def _kill_strays(self, stages: set[int]) -> list[str]:
        """Kill what stages have started and left; what cannot be killed, but for the stages themselves."""
        swept = await asyncio.to_thread(sweep_strays, self._runtime.run, self._stop_plan.strays_s)
        stuck = [process for process in swept.left if process.pid not in stages]
        for process in swept.killed:
            if process not in stuck and process.pid not in stages:
                self._say(f"left by a stage (pid {process.pid}, {process.shown_name}): killed")
        return [f"{tree.describe(process)} survived SIGKILL" for process in stuck]


def _since(began_s: float) -> str:
    return format_duration(time.monotonic() - began_s)


def _story(found: launch.Failure | None) -> StageFailure | None:
    if found is None:
        return None
    if isinstance(found.cause, StageFailure):
        return found.cause
    return StageFailure(None, None, "launch", str(found.cause), 0.0)
