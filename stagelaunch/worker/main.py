"""A stage's process from its first line to its last. Entered from the forkserver.

Leaves by ``os._exit``: the interpreter's own exit can hang on what a library left behind, and device memory is the
driver's to take back.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from stagelaunch.core import messages as m
from stagelaunch.core.phases import Phase
from stagelaunch.core.run_spec import StageRun, run_from_json
from stagelaunch.system.regular import read_regular
from stagelaunch.system.tree import STAGE_VARIABLE
from stagelaunch.worker.control import Control
from stagelaunch.worker.output import Output, flush_output
from stagelaunch.worker.reporter import Reporter

if TYPE_CHECKING:
    from stagelaunch.engines.base import Engine


def run(run_file: str, stage_id: int, channel: socket.socket) -> None:
    """Boot the stage and serve until told to stop. Never returns; the exit code is 0 only after an orderly stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    reporter = Reporter(channel)
    try:
        stage = run_from_json(read_regular(Path(run_file)).decode(), stage_id)
        output = Output(stage.log_path, reporter.log_lost)
        output.redirect()
        control = Control(channel, reporter, output)
        control.start()
        # Whatever it starts by exec carries its name; what it forks is known by its session.
        os.environ.update({**stage.env, STAGE_VARIABLE: stage.name})
        _boot_and_serve(stage, reporter, control)
    except BaseException as error:  # a worker has no caller: everything it can raise is the stage's failure
        reporter.failed(error)
        _leave(1)
    _leave(0)


def _boot_and_serve(stage: StageRun, reporter: Reporter, control: Control) -> None:
    with reporter.phase(Phase.IMPORT):
        # Imported here: torch takes seconds, and its environment must be set before.
        from stagelaunch.devices.factory import open_device
        from stagelaunch.engines.base import create_engine
        from stagelaunch.system.claims import publish_member
        from stagelaunch.system.locks import DeviceLocks, LockDirectory
        from stagelaunch.worker.boot import Boot

        engine = create_engine(stage.engine, stage.spec)
        engine.import_libraries()
        device = open_device(stage.backend, stage.device_uuid, stage.machine)
        owner = f"{stage.deployment}/{stage.name}"
        locks = DeviceLocks(LockDirectory(stage.lock_dir), [stage.device_uuid], owner=owner)
        # What was imported stays for good: collections during the boot need not look at it again.
        gc.collect()
        gc.freeze()
    memberships = []

    def join_claim(driver_pid: int | None) -> None:
        # Kept for life: to others this process's memory counts for the deployment's claim as long as the record lives.
        memberships.append(publish_member(stage.lock_dir, stage.device_uuid, stage.claim_id, driver_pid))

    Boot(stage, engine, device, locks, reporter, join_claim).walk()
    reporter.ready()
    for message in control.requests():
        match message:
            case m.Probe(request_id):
                reporter.send(_probe(engine, request_id))
            case m.Stop():
                break
    reporter.current = Phase.STOP
    engine.close()
    device.close()
    for membership in memberships:
        membership.close()


def _probe(engine: Engine, request_id: int) -> m.Probed:
    """The engine's answer; what is wrong with it, or with how it came about, is an answer too, not the stage's end."""
    try:
        result = engine.probe()
        return m.Probed(
            request_id,
            int(result.batch_size),
            bool(result.through_graph),
            float(result.max_abs_diff),
            tuple(int(size) for size in result.output_shape),
            float(result.elapsed_s),
        )
    except Exception as error:
        return m.Probed(request_id, 0, False, 0.0, (), 0.0, error=f"{type(error).__name__}: {error}"[:1000])


def _leave(code: int) -> None:
    flush_output()
    os._exit(code)
