"""Asking what stages will need without being taken along when an engine hangs or dies.

For the supervisor and the commands: imports no torch. A process of its own (``worker.forecast``) walks the engines,
under one deadline for all of them; what it answered until then counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.budgets import Forecasts, context_term
from stagelaunch.core.engine_spec import spec_of
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.need import NeedRequest, Needs, StageNeed, need_from_json, request_to_json
from stagelaunch.core.units import format_duration

# By name only: importing it here would pull torch into the supervisor.
_COMMAND = (sys.executable, "-m", "stagelaunch.worker.forecast")
_ENVIRONMENT = {
    # A plan must touch no device, whatever an engine tries.
    "CUDA_VISIBLE_DEVICES": "",
    # Shapes are computed by Python: more threads only fight.
    "OMP_NUM_THREADS": "1",
}
_REAP_S = 1.0
"""How long a killed process is waited for; one that hangs in the kernel is left to init."""
_SHOWN_CHARS = 500


FORECAST_TIMEOUT_S = 180.0
"""For all stages together: libraries are imported once, then each stage takes seconds."""


def need_requests(loaded: LoadedDeployment, *, auto_only: bool) -> tuple[NeedRequest, ...]:
    """What to ask for the stages of a deployment: all, or those whose budget is to be worked out."""
    stages = [stage for stage in loaded.deployment.stages if stage.demand is None or not auto_only]
    return tuple(NeedRequest(stage.id, stage.engine, spec_of(stage, loaded.model_dir), stage.env) for stage in stages)


def forecasts_of(needs: Needs, machine: SimulatedMachine | None) -> Forecasts:
    """The needs beside what a context costs on the deployment's devices."""
    context = context_term(None if machine is None else machine.context_bytes)
    return Forecasts(context, needs.found, needs.errors)


async def ask_needs(requests: Sequence[NeedRequest], timeout_s: float) -> Needs:
    """The need of every stage, or why there is none; never raises for a stage.

    Returns within ``timeout_s`` and a moment. Cancelling it kills the asking process at once. Call it from a thread
    that lasts: the asking process dies with the thread that started it.
    """
    with _Asking(requests) as asking:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(asking.pidfd, ended.set)
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            return asking.needs(_late(timeout_s))
        finally:
            loop.remove_reader(asking.pidfd)
        return asking.needs()


def ask_needs_sync(requests: Sequence[NeedRequest], timeout_s: float) -> Needs:
    """``ask_needs`` for callers without an event loop."""
    with _Asking(requests) as asking:
        ended, _, _ = select.select([asking.pidfd], [], [], timeout_s)
        return asking.needs(None if ended else _late(timeout_s))


class _Asking:
    """The asking process between files: no pipe can fill up, and its last words are kept. Ended with the context."""

    def __init__(self, requests: Sequence[NeedRequest]) -> None:
        self._requests = requests
        self._files = ExitStack()
        self._answers = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._errors = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        job = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        # The path as a worker would have it: engines are found by it.
        text = {"parent_pid": os.getpid(), "path": sys.path, "requests": [request_to_json(r) for r in requests]}
        job.write(json.dumps(text).encode())
        job.seek(0)
        # A session of its own: what an engine starts is found again by its process group.
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=job,
            stdout=self._answers,
            stderr=self._errors,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self._process.pid)
        """Readable when the process has ended."""

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        os.close(self.pidfd)
        self._files.close()

    def needs(self, why_not: str | None = None) -> Needs:
        """What was answered; ``why_not``, or how the process ended, for every stage that was not. Ends the process."""
        self._end()
        why_not = self._death() if why_not is None else why_not
        found: dict[int, StageNeed] = {}
        errors = {request.stage_id: _error(why_not) for request in self._requests}
        for line in _lines(self._answers):
            with suppress(ValueError):  # the last line may be half a line
                _take(json.loads(line), found, errors)
        return Needs(found, errors)

    def _end(self) -> None:
        # Not reaped before: until then its number is nobody else's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)

    def _death(self) -> str:
        last_words = _lines(self._errors)
        said = last_words[-1][:_SHOWN_CHARS] if last_words else "it said nothing"
        return f"the asking process ended with {self._process.returncode}: {said}"


def _take(body: Mapping[str, object], found: dict[int, StageNeed], errors: dict[int, str]) -> None:
    stage_id, need = body["stage_id"], body.get("need")
    assert isinstance(stage_id, int)
    if isinstance(need, dict):
        found[stage_id] = need_from_json(need)
        del errors[stage_id]
    else:
        errors[stage_id] = _error(str(body["error"]))


def _error(cause: str) -> str:
    return f"cannot forecast the stage: {cause}; correct that, or give the stage a budget"


def _lines(file: IO[bytes]) -> list[str]:
    """Whole and half lines that hold something."""
    file.seek(0)
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _late(timeout_s: float) -> str:
    return f"there was no answer within {format_duration(timeout_s)}"
