"""A deployment from claim to clean-up: what ``stagelaunch up`` runs, once, in the supervisor's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from filelock import FileLock

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.config import Deployment
from stagelaunch.core.errors import ExitCode, LockDirectoryError, StagelaunchError
from stagelaunch.core.events import EventKind, News
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.launch_policy import restart_budget
from stagelaunch.core.narrate import used_up_text
from stagelaunch.core.outcome import Outcome
from stagelaunch.core.run_options import RunOptions
from stagelaunch.core.run_spec import runs_to_json
from stagelaunch.core.units import format_duration, format_size
from stagelaunch.supervisor import remembered
from stagelaunch.supervisor.admission import Admitted, admit, refuse_if_claimed
from stagelaunch.supervisor.endings import note_begin, note_ending, note_outcome
from stagelaunch.supervisor.events import EventLog
from stagelaunch.supervisor.grounds import with_grounds
from stagelaunch.supervisor.leftovers import clear_leftovers
from stagelaunch.supervisor.look import begin
from stagelaunch.supervisor.notify import NotifySocket
from stagelaunch.supervisor.reload import reload_file
from stagelaunch.supervisor.runtime import Runtime, writable, write_atomically
from stagelaunch.supervisor.service import ServiceNotifier
from stagelaunch.supervisor.session import Listener, Session
from stagelaunch.supervisor.stacks import dump_threads_on_quit
from stagelaunch.supervisor.waiting import Patience
from stagelaunch.supervisor.weight_plans import write_plans
from stagelaunch.system.locks import LockDirectory

__all__ = ["Listener", "RunOptions", "run_deployment"]


async def run_deployment(
    loaded: LoadedDeployment,
    machine: SimulatedMachine | None,
    runtime: Runtime,
    listener: Listener,
    options: RunOptions,
) -> Outcome:
    """Claim, admit, boot, watch, stop, verify; with ``on_failure: restart-all`` once more, within its budget.

    Returns how it ended; raises only before anything was spawned. Until then a signal that would stop it ends it with
    CancelledError (Ctrl-C may also be KeyboardInterrupt).
    """
    try:
        runtime.create()
        dump_threads_on_quit(runtime.stacks)
        with _owned(runtime) as lock, closing(_service(options, listener, loaded.deployment)) as service:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, listener.say, "SIGHUP: nothing to reload yet")
            _cancel_on_signals()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, listener.reopen)
            # What cannot be read there is said when it is needed.
            with contextlib.suppress(LockDirectoryError):
                refuse_if_claimed(loaded.lock_dir, loaded.deployment.name, runtime)
            listener.on_owned()
            runtime.clear_drafts()
            await clear_leftovers(runtime, listener.say)
            return await _Rounds(loaded, machine, runtime, lock, listener, options, service).run()
    finally:
        # The loop's handlers end with the loop: what comes while the last words are said must not cut them off.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)


_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def _owned(runtime: Runtime) -> Iterator[FileLock]:
    lock = runtime.claim()
    try:
        yield lock
    finally:
        # Not by the lock's own ``with``, which counts how often it was taken.
        lock.release(force=True)


def _service(options: RunOptions, listener: Listener, deployment: Deployment) -> ServiceNotifier:
    manager = NotifySocket(options.service.address, listener.say)
    return ServiceNotifier(manager, options.service.watchdog_s, deployment.timeouts)


class _Rounds:
    """The boots of one deployment, one after another: mostly one, with ``on_failure: restart-all`` perhaps more."""

    def __init__(
        self,
        loaded: LoadedDeployment,
        machine: SimulatedMachine | None,
        runtime: Runtime,
        lock: FileLock,
        listener: Listener,
        options: RunOptions,
        service: ServiceNotifier,
    ) -> None:
        self._loaded = loaded
        self._machine = machine
        self._runtime = runtime
        self._lock = lock
        self._listener = listener
        self._say = listener.say
        self._options = options
        self._service = service
        self._granted: tuple[float, ...] = ()
        """When each restart was granted."""

    async def run(self) -> Outcome:
        """How the last round ended that got as far as starting stages."""
        ended: Outcome | None = None
        while True:
            _cancel_on_signals()
            try:
                ended, asked_to_stop = await self._round()
                if asked_to_stop or not await self._until_restart(ended):
                    return ended
            except (StagelaunchError, asyncio.CancelledError) as error:
                if ended is None:
                    raise
                # It had failed before, and that is how it ended: it only could not be started again.
                self._say(f"is not started again: {str(error) or 'asked to stop'}")
                note_outcome(self._runtime, ended)
                return ended

    async def _round(self) -> tuple[Outcome, bool]:
        """How it ended, and whether anybody had asked for that."""
        events = EventLog()
        events.add(News(EventKind.ADMITTING))
        with ExitStack() as held:
            try:
                lock_dir, admitted = await self._admit(held)
            except BaseException as error:
                reason = str(error) if isinstance(error, StagelaunchError) else None
                note_ending(self._runtime, exit_code=_exit_code(error), leftovers=[], reason=reason)
                raise
            session = Session(
                self._loaded, admitted, self._runtime, self._lock, lock_dir, self._listener, events, self._options,
                self._service,
            )  # fmt: skip
            try:
                outcome = await session.run()
            except BaseException as error:
                note_ending(self._runtime, exit_code=_exit_code(error))
                raise
            self._loaded = session.loaded
            note_outcome(self._runtime, outcome, session.stages())
            return outcome, session.asked_to_stop

    async def _admit(self, held: ExitStack) -> tuple[LockDirectory, Admitted]:
        loaded, runtime, wait_s = self._loaded, self._runtime, self._options.wait_for_memory_s
        with writable(runtime.directory):
            runtime.write_state("admitting", config=str(loaded.path))
        lock_dir = LockDirectory(loaded.lock_dir)
        patience = None if wait_s is None else Patience(wait_s, self._say, runtime)
        _say_what_is_forecast(loaded.deployment, self._listener)
        self._service.admitting(wait_s or 0.0)
        admitted = await admit(loaded, self._machine, runtime, lock_dir, held, patience)
        admitted = await self._with_what_is_remembered(admitted)
        note_begin(runtime)
        with writable(runtime.directory):
            write_plans(admitted.runs, admitted.weight_plans)
            write_atomically(runtime.run_file, runs_to_json(admitted.runs))
            runtime.write_state("booting", config=str(loaded.path))
        return lock_dir, admitted

    async def _with_what_is_remembered(self, admitted: Admitted) -> Admitted:
        runs = await begin(lambda: with_grounds(admitted.runs, admitted.devices, os.environ))
        recalled = remembered.recall(self._runtime.remembered, runs, reuse=self._options.reuse_plan)
        for remark in recalled.remarks:
            self._say(remark)
        for run in recalled.runs:
            if run.graphs_correction_bytes and run.plan is None:
                size = format_size(run.graphs_correction_bytes)
                self._say(f"{run.name}: {size} less KV cache than estimated: an earlier boot found its graphs larger")
        return replace(admitted, runs=recalled.runs)

    async def _until_restart(self, ended: Outcome) -> bool:
        """True when the whole is to be started again, once its pause is over; False when it is not.

        Cancelled by a signal, as before the first start.
        """
        deployment = self._loaded.deployment
        failed = ended.first is not None and ended.was_ready
        if deployment.on_failure != "restart-all" or not failed or ended.leftovers:
            return False
        now_s, budget = time.monotonic(), restart_budget(deployment)
        restart_at_s = budget.next_at_s(self._granted, now_s)
        if restart_at_s is None:
            self._say(used_up_text(budget))
            return False
        self._granted = (*self._granted, now_s)
        assert ended.first is not None
        self._say(ended.first.headline())
        pause = format_duration(restart_at_s - now_s)
        self._say(f"everything is started again in {pause} (restart {len(self._granted)})")
        _cancel_on_signals()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        with contextlib.suppress(OSError):
            self._runtime.write_state("restarting")
        await asyncio.sleep(restart_at_s - now_s)
        return True

    def _reload(self) -> None:
        """Between two rounds: the next one is run as the file says now, as far as that can be taken over."""
        reloaded = reload_file(self._loaded.path, self._loaded.deployment)
        self._say(f"reloading {self._loaded.path}")
        for line in reloaded.lines:
            self._say(f"  {line}")
        self._loaded = replace(self._loaded, deployment=reloaded.deployment)


def _say_what_is_forecast(deployment: Deployment, listener: Listener) -> None:
    names = [stage.name for stage in deployment.stages if stage.demand is None]
    if names:
        listener.say(f"working out the budget of {', '.join(names)}; this takes some seconds")


def _exit_code(error: BaseException) -> int | None:
    """Of a run that ended without an outcome; None for our own bug."""
    match error:
        case StagelaunchError():
            return int(error.exit_code)
        case asyncio.CancelledError() | KeyboardInterrupt():
            return int(ExitCode.INTERRUPTED)
        case _:
            return None


def _cancel_on_signals() -> None:
    """Until there is a session that stops in good order there is nothing to stop: leave. It takes the signals over."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    # Blocked by the warden until here: what came earlier comes now, and ends this before anything was started.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
