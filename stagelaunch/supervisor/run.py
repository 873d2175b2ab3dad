"""A deployment from claim to clean-up: what ``stagelaunch up`` runs, once, in the foreground process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core import failure, launch
from stagelaunch.core.board import Timeouts
from stagelaunch.core.config import Deployment
from stagelaunch.core.errors import ExitCode, NoDeviceError, StagelaunchError
from stagelaunch.core.failure import StageFailure
from stagelaunch.core.groups import init_groups
from stagelaunch.core.inventory import DeviceInfo, SimulatedMachine
from stagelaunch.core.outcome import Outcome, memory_leftovers
from stagelaunch.core.run_spec import runs_to_json
from stagelaunch.core.units import format_size
from stagelaunch.supervisor import corrections
from stagelaunch.supervisor.admission import Admitted, admit, devices_now
from stagelaunch.supervisor.control import ControlServer, Handlers
from stagelaunch.supervisor.notify import NO_SERVICE, NotifySocket, ServiceLink
from stagelaunch.supervisor.runtime import Runtime, writable, write_atomically
from stagelaunch.supervisor.service import ServiceNotifier
from stagelaunch.supervisor.status import stage_bodies, status_body
from stagelaunch.supervisor.supervisor import KILL_WAIT_S, Supervisor
from stagelaunch.supervisor.waiting import Patience
from stagelaunch.system.locks import LockDirectory, sweep

ASK_SHARE = 0.8
"""Of the stop grace: what a ready stage has to answer to being asked before TERM."""
MEMORY_POLL_S = 0.05
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


async def run_deployment(
    loaded: LoadedDeployment,
    machine: SimulatedMachine | None,
    runtime: Runtime,
    listener: Listener,
    wait_for_memory_s: float | None = None,
    link: ServiceLink = NO_SERVICE,
    ci: bool = False,
) -> Outcome:
    """Claim, admit, boot, watch, stop, verify. Returns how it ended; raises only before anything was spawned.

    Until then a signal that would stop it ends it with CancelledError (Ctrl-C may also be KeyboardInterrupt).
    """
    runtime.create()
    with runtime.claim(), ExitStack() as held:
        service = _service(link, listener, loaded.deployment)
        held.callback(service.close)
        _cancel_on_signals()
        try:
            with writable(runtime.directory):
                runtime.write_state("admitting", config=str(loaded.path))
            lock_dir = LockDirectory(loaded.lock_dir)
            patience = None if wait_for_memory_s is None else Patience(wait_for_memory_s, listener.say, runtime)
            _say_what_is_forecast(loaded.deployment, listener)
            service.admitting(wait_for_memory_s or 0.0)
            admitted = await admit(loaded, machine, runtime, lock_dir, held, patience)
            admitted = _with_corrections(admitted, runtime, listener)
            with writable(runtime.directory):
                write_atomically(runtime.run_file, runs_to_json(admitted.runs))
                runtime.write_state("booting", config=str(loaded.path))
        except BaseException as error:
            _note_ending(runtime, exit_code=_exit_code(error), leftovers=[])
            raise
        outcome = None
        session = _Session(admitted, runtime, lock_dir, listener, service, ci)
        try:
            outcome = await session.run()
        finally:
            _note_ending(runtime, **_ending(outcome), stages=session.stages())
        return outcome


def _service(link: ServiceLink, listener: Listener, deployment: Deployment) -> ServiceNotifier:
    manager = NotifySocket(link.address, listener.say)
    return ServiceNotifier(manager, link.watchdog_s, deployment.timeouts, KILL_WAIT_S)


def _say_what_is_forecast(deployment: Deployment, listener: Listener) -> None:
    names = [stage.name for stage in deployment.stages if stage.demand is None]
    if names:
        listener.say(f"working out the budget of {', '.join(names)}; this takes some seconds")


def _note_ending(runtime: Runtime, **how: Any) -> None:
    # A full disk or a deleted directory takes nothing away from how it ended.
    with contextlib.suppress(OSError):
        runtime.write_state("ended", **how)


def _exit_code(error: BaseException) -> int | None:
    """Of a run that ended before anything was started; None for our own bug."""
    match error:
        case StagelaunchError():
            return int(error.exit_code)
        case asyncio.CancelledError() | KeyboardInterrupt():
            return int(ExitCode.INTERRUPTED)
        case _:
            return None


def _with_corrections(admitted: Admitted, runtime: Runtime, listener: Listener) -> Admitted:
    runs, remarks = corrections.recall(runtime.corrections, admitted.runs)
    for remark in remarks:
        listener.say(remark)
    for run in runs:
        if run.graphs_correction_bytes:
            size = format_size(run.graphs_correction_bytes)
            listener.say(f"{run.name}: {size} less KV cache than estimated: an earlier boot found its graphs larger")
    return replace(admitted, runs=runs)


def _cancel_on_signals() -> None:
    """Until there is a session that stops in good order there is nothing to stop: leave. It takes the signals over."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in _stop_signals():
        loop.add_signal_handler(number, task.cancel)


def _stop_signals() -> tuple[signal.Signals, ...]:
    # Under nohup a closed terminal is to be ignored; otherwise it ends what ran in it, in good order.
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


class _Session:
    """One run of one admitted deployment."""

    def __init__(
        self,
        admitted: Admitted,
        runtime: Runtime,
        lock_dir: LockDirectory,
        listener: Listener,
        service: ServiceNotifier,
        ci: bool,
    ) -> None:
        self._service = service
        self._ci = ci
        self._deployment = deployment = admitted.deployment
        self._admitted = admitted
        self._runtime = runtime
        self._lock_dir = lock_dir
        self._listener = listener
        self._interrupted = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervisor = Supervisor(
            admitted.runs, _policy(deployment), _timeouts(deployment), runtime, listener.say, self._ready
        )

    async def run(self) -> Outcome:
        """Boot and watch until every stage is over, then look for what is left."""
        self._listen_to_signals()
        # A Ctrl-C that came just before has only marked this task as cancelled: let it end here, with nothing started.
        await asyncio.sleep(0)
        server = ControlServer(self._runtime, self._handlers())
        await server.start()
        try:
            self._listener.on_started()
            self._service.booting(self._supervisor.views, self._why_stopping)
            result = await self._supervisor.run()
            self._service.tick()
            leftovers = await self._leftovers(result)
        finally:
            self._sweep_locks()
            await server.close()
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
        state = self._supervisor.state
        if state.mode not in (launch.Mode.STOPPING, launch.Mode.FINISHED):
            return None
        story = _story(state.first_failure)
        return str(state.stop_reason) if story is None else story.headline()

    def _sweep_locks(self) -> None:
        """A killed stage leaves its record beside the device lock; the lock itself went with it."""
        gone = self._supervisor.gone_pids()
        for info in self._admitted.devices.values():
            sweep(self._lock_dir, info.uuid, gone)

    def _handlers(self) -> Handlers:
        return Handlers(
            status=self._status,
            down=lambda now: self._supervisor.request_stop("asked by `stagelaunch down`", again=False, now=now),
            ready_stages=self._ready_stages,
            probe=self._supervisor.probe,
        )

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._supervisor.request_stop, "SIGTERM")
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        if signal.SIGHUP in _stop_signals():
            loop.add_signal_handler(signal.SIGHUP, self._supervisor.request_stop, "its terminal was closed (SIGHUP)")

    def _interrupt(self) -> None:
        self._interrupted = True
        self._supervisor.request_stop("Ctrl-C")

    def _ready(self) -> None:
        task = asyncio.create_task(self._announce_ready())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _announce_ready(self) -> None:
        self._note_state("ready")
        self._service.ready()
        self._listener.on_ready(await self._status())

    def _note_state(self, state: str) -> None:
        """The stages are ready whether or not that can be written down."""
        try:
            self._runtime.write_state(state)
        except OSError as error:
            self._listener.say(f"cannot record the state in {self._runtime.state}: {error.strerror}")

    async def _status(self) -> dict[str, Any]:
        before = self._admitted.devices
        now = await self._devices_now(min(STATUS_DRIVER_S, self._deployment.timeouts.driver_s))
        return status_body(self._deployment, self._supervisor, before, now, time.monotonic())

    def _ready_stages(self) -> dict[str, int]:
        state = self._supervisor.state
        ready = state.ids({launch.StageState.READY})
        return {stage.name: stage.id for stage in self._deployment.stages if stage.id in ready}

    async def _leftovers(self, result: launch.LaunchResult) -> tuple[str, ...]:
        """Processes that survived KILL, and device memory that did not come back within the stop timeout."""
        pids = self._supervisor.pids()
        stuck = tuple(
            f"stage {self._deployment.stage(i).name}: process {pids[i]} survived SIGKILL" for i in result.abandoned
        )
        return (*stuck, *await self._memory_left(set(pids.values())))

    async def _memory_left(self, own_pids: set[int]) -> tuple[str, ...]:
        # SIGKILL returning is not memory released: the driver frees it later.
        deadline_s = time.monotonic() + self._deployment.timeouts.stop_s
        while True:
            texts = await self._memory_missing(own_pids)
            if not texts or time.monotonic() >= deadline_s:
                return texts
            await asyncio.sleep(MEMORY_POLL_S)

    async def _memory_missing(self, own_pids: set[int]) -> tuple[str, ...]:
        try:
            now = await self._devices_now(self._deployment.timeouts.driver_s)
        except NoDeviceError as error:
            return error.findings
        return memory_leftovers(self._admitted.devices, now, own_pids)

    async def _devices_now(self, timeout_s: float) -> dict[int, DeviceInfo]:
        return await devices_now(self._admitted.devices, self._deployment.backend, self._admitted.machine, timeout_s)


def _policy(deployment: Deployment) -> launch.LaunchPolicy:
    grace_s = deployment.timeouts.stop_s
    return launch.LaunchPolicy(
        groups=tuple(tuple(group) for group in init_groups(deployment.stage_devices)),
        order=launch.Order(deployment.order),
        max_running_groups=None,
        on_failure=launch.OnFailure.STOP,
        ladder=launch.StopLadder(ASK_SHARE * grace_s, grace_s, grace_s + KILL_WAIT_S),
    )


def _timeouts(deployment: Deployment) -> Timeouts:
    limits = deployment.timeouts
    return Timeouts(limits.phase_s, limits.stage_s, limits.boot_s, limits.lock_s, limits.stop_s)


def _story(found: launch.Failure | None) -> StageFailure | None:
    if found is None:
        return None
    if isinstance(found.cause, StageFailure):
        return found.cause
    return StageFailure(None, None, "launch", str(found.cause), 0.0)


def _ending(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {"exit_code": None}
    return {
        "exit_code": int(outcome.exit_code),
        "first_failure": None if outcome.first is None else failure.to_json(outcome.first),
        "consequences": [failure.to_json(other) for other in outcome.consequences],
        "leftovers": list(outcome.leftovers),
    }
