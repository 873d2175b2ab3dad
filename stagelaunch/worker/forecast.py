"""What stages will need, without a device: the engine's own code walked on one whose tensors have no data.

Not a boot: nothing is read but the checkpoint's headers, no lock is taken, no device is touched.
``supervisor.forecast`` runs it as a program, because engines import torch: a job on stdin, an answer a line on stdout.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.ledger import estimate_graphs
from stagelaunch.core.need import NeedRequest, StageNeed, need_to_json, request_from_json
from stagelaunch.system.process import die_with_parent

MAX_TEXT_CHARS = 2_000


def forecast(spec: EngineSpec, engine_name: str) -> StageNeed:
    """What the stage will take, by the rules of a simulated device. A stage over several devices counts as one.

    Raises StageError for an engine that is not there, and whatever the engine raises, also because it needs data.
    """
    # Imported here: torch takes seconds, and the program sets its environment first.
    from stagelaunch.devices.forecast import ForecastDevice
    from stagelaunch.engines.base import create_engine
    from stagelaunch.worker import measure

    engine, device = create_engine(engine_name, spec), ForecastDevice()
    device.create_context()
    engine.import_libraries()
    # What was imported stays for good: collections need not look at it again.
    gc.freeze()
    engine.allocate_weights(device)

    def capture(size: int) -> int:
        before = device.memory().reserved_bytes
        engine.capture(size)
        measure.settle(device)
        return device.memory().reserved_bytes - before

    measure.settle(device)
    # One run: nothing is compiled here and no workspace is counted, so there is nothing to warm up.
    activations = measure.activations(engine, device)
    trials = measure.trial_captures(engine, spec.capture_sizes, capture)
    need = StageNeed(
        weights_bytes=measure.resident(device).size_bytes,
        activations_bytes=activations.size_bytes,
        graphs_bytes=estimate_graphs(trials, len(spec.capture_sizes)),
        layout=engine.kv_layout,
    )
    engine.close()
    return need


def main() -> int:
    """Answer a job on stdin (parent_pid, path, requests): one JSON line a stage, with its need or an error."""
    job = json.load(sys.stdin)
    die_with_parent(int(job["parent_pid"]))
    sys.path[:] = job["path"]
    with _private_stdout() as answers:
        for body in job["requests"]:
            request = request_from_json(body)
            print(json.dumps(_answer(request)), file=answers, flush=True)
    return 0


def _answer(request: NeedRequest) -> Mapping[str, Any]:
    """The need, or what went wrong: one stage's failure is not another's."""
    from stagelaunch.core.errors import StagelaunchError

    try:
        with _environment(request.env):
            return {"stage_id": request.stage_id, "need": need_to_json(forecast(request.spec, request.engine))}
    except StagelaunchError as error:
        text = str(error)
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
    return {"stage_id": request.stage_id, "error": text[:MAX_TEXT_CHARS]}


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """The stage's own variables, for as long as it is its turn."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _private_stdout() -> Iterator[TextIO]:
    """Where the answers go; whatever else is printed, by an engine or a library, goes to stderr."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        yield answers
    finally:
        answers.close()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The interpreter's own exit can hang on what a library left behind.
    os._exit(code)
