"""A deployment from claim to clean-up: what ``stagelaunch up`` runs, once, in the supervisor's process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from contextlib import ExitStack
from dataclasses import replace

from filelock import FileLock

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.config import Deployment
from stagelaunch.core.errors import ExitCode, LockDirectoryError, StagelaunchError
from stagelaunch.core.events import EventKind, News
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.outcome import Outcome
from stagelaunch.core.run_options import RunOptions
from stagelaunch.core.run_spec import runs_to_json
from stagelaunch.core.units import format_duration, format_size
from stagelaunch.supervisor import corrections
from stagelaunch.supervisor.admission import Admitted, admit, refuse_if_claimed
from stagelaunch.supervisor.endings import note_begin, note_ending, note_outcome
from stagelaunch.supervisor.events import EventLog
from stagelaunch.supervisor.leftovers import clear_leftovers
from stagelaunch.supervisor.runtime import Runtime, writable, write_atomically
from stagelaunch.supervisor.session import Listener, Session, dump_threads_on_quit, restart_budget
from stagelaunch.supervisor.waiting import Patience
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
    runtime.create()
    dump_threads_on_quit(chain=False)
    with runtime.claim() as lock:
        _cancel_on_signals()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, listener.reopen)
        # What cannot be read there is said when it is needed.
        with contextlib.suppress(LockDirectoryError):
            refuse_if_claimed(loaded.lock_dir, loaded.deployment.name, runtime)
        await clear_leftovers(runtime, listener.say)
        granted: tuple[float, ...] = ()
        ended: Outcome | None = None
        while True:
            _cancel_on_signals()
            try:
                ended, loaded = await _run_once(loaded, machine, runtime, lock, listener, options)
                granted = await _until_restart(loaded.deployment, ended, granted, runtime, listener)
            except (StagelaunchError, asyncio.CancelledError) as error:
                if ended is None:
                    raise
                # It had failed before, and that is how it ended: it only could not be started again.
                listener.say(f"is not started again: {str(error) or 'asked to stop'}")
            else:
                if granted:
                    continue
            note_outcome(runtime, ended)
            return ended


async def _run_once(
    loaded: LoadedDeployment,
    machine: SimulatedMachine | None,
    runtime: Runtime,
    lock: FileLock,
    listener: Listener,
    options: RunOptions,
) -> tuple[Outcome, LoadedDeployment]:
    """How it ended, and the config as it was reloaded meanwhile."""
    events = EventLog()
    events.add(News(EventKind.ADMITTING))
    with ExitStack() as held:
        try:
            with writable(runtime.directory):
                runtime.write_state("admitting", config=str(loaded.path))
            lock_dir = LockDirectory(loaded.lock_dir)
            wait_s = options.wait_for_memory_s
            patience = None if wait_s is None else Patience(wait_s, listener.say, runtime)
            _say_what_is_forecast(loaded.deployment, listener)
            admitted = await admit(loaded, machine, runtime, lock_dir, held, patience)
            admitted = _with_corrections(admitted, runtime, listener)
            note_begin(runtime)
            with writable(runtime.directory):
                write_atomically(runtime.run_file, runs_to_json(admitted.runs))
                runtime.write_state("booting", config=str(loaded.path))
        except BaseException as error:
            note_ending(runtime, exit_code=_exit_code(error), leftovers=[])
            raise
        outcome = None
        try:
            session = Session(loaded, admitted, runtime, lock, lock_dir, listener, events, options)
            outcome = await session.run()
        finally:
            note_outcome(runtime, outcome)
        return outcome, session.loaded


async def _until_restart(
    deployment: Deployment, ended: Outcome, granted: tuple[float, ...], runtime: Runtime, listener: Listener
) -> tuple[float, ...]:
    """Returns when the whole may be started again, with the times of all such grants; with none when it may not.

    Cancelled by a signal, as before the first start.
    """
    failed = ended.first is not None and ended.was_ready and not ended.asked_to_stop
    if deployment.on_failure != "restart-all" or not failed or ended.leftovers:
        return ()
    now_s, budget = time.monotonic(), restart_budget(deployment)
    restart_at_s = budget.next_at_s(granted, now_s)
    if restart_at_s is None:
        within = format_duration(budget.within_s)
        listener.say(f"is not started again: {budget.max_restarts} restarts within {within} are used up")
        return ()
    pause_s = restart_at_s - now_s
    assert ended.first is not None
    listener.say(f"{ended.first.headline()}")
    listener.say(f"everything is started again in {format_duration(pause_s)} (restart {len(granted) + 1})")
    _cancel_on_signals()
    with contextlib.suppress(OSError):
        runtime.write_state("restarting")
    await asyncio.sleep(pause_s)
    return (*granted, now_s)


def _say_what_is_forecast(deployment: Deployment, listener: Listener) -> None:
    names = [stage.name for stage in deployment.stages if stage.demand is None]
    if names:
        listener.say(f"working out the budget of {', '.join(names)}; this takes some seconds")


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
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    # Blocked by the warden until here: what came earlier comes now, and ends this before anything was started.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
