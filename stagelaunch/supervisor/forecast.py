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
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.budgets import Forecasts, context_term
from stagelaunch.core.engine_spec import spec_of
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.need import NeedRequest, Needs, StageNeed, need_from_json, request_to_json
from stagelaunch.core.units import format_duration
from stagelaunch.system.process import signal_name

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
    loop, asked = asyncio.get_running_loop(), _Asked(requests, timeout_s)
    while asked.open:
        with _Asking(asked.open) as asking:
            ended = asyncio.Event()
            loop.add_reader(asking.pidfd, ended.set)
            try:
                async with asyncio.timeout(asked.left_s):
                    await ended.wait()
            except TimeoutError:
                asked.take_last(asking.needs())
            else:
                asked.take(asking.needs(), asking.death)
            finally:
                loop.remove_reader(asking.pidfd)
    return asked.needs


def ask_needs_sync(requests: Sequence[NeedRequest], timeout_s: float) -> Needs:
    """``ask_needs`` for callers without an event loop."""
    asked = _Asked(requests, timeout_s)
    while asked.open:
        with _Asking(asked.open) as asking:
            ended, _, _ = select.select([asking.pidfd], [], [], max(asked.left_s, 0.0))
            needs = asking.needs()
            if ended:
                asked.take(needs, asking.death)
            else:
                asked.take_last(needs)
    return asked.needs


class _Asked:
    """What is answered and what is still open. A process that dies costs the stage it was at; the others ask again."""

    def __init__(self, requests: Sequence[NeedRequest], timeout_s: float) -> None:
        self.open = tuple(requests)
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._found: dict[int, StageNeed] = {}
        self._errors: dict[int, str] = {}

    @property
    def left_s(self) -> float:
        """Until the deadline; below zero when it has passed."""
        return self._deadline_s - time.monotonic()

    @property
    def needs(self) -> Needs:
        """All answers."""
        return Needs(self._found, self._errors)

    def take(self, answers: Needs, death: str) -> None:
        """Of a process that ended: stages are forecast in order, so it died of the first without an answer."""
        self._keep(answers)
        if self.open:
            culprit, *rest = self.open
            self._errors[culprit.stage_id] = _error(death)
            self.open = tuple(rest)

    def take_last(self, answers: Needs) -> None:
        """Of a process that took too long: whatever is open stays without an answer."""
        self._keep(answers)
        late = _error(f"there was no answer within {format_duration(self._timeout_s)}")
        self._errors |= dict.fromkeys((request.stage_id for request in self.open), late)
        self.open = ()

    def _keep(self, answers: Needs) -> None:
        self._found |= answers.found
        self._errors |= answers.errors
        known = answers.found.keys() | answers.errors.keys()
        self.open = tuple(request for request in self.open if request.stage_id not in known)


class _Asking:
    """The asking process between files: no pipe can fill up, and its last words are kept. Ended with the context."""

    def __init__(self, requests: Sequence[NeedRequest]) -> None:
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

    def needs(self) -> Needs:
        """What was answered; a stage without an answer is in neither part. Ends the process."""
        self._end()
        found: dict[int, StageNeed] = {}
        errors: dict[int, str] = {}
        for line in _lines(self._answers):
            with suppress(ValueError):  # the last line may be half a line
                _take(json.loads(line), found, errors)
        return Needs(found, errors)

    @property
    def death(self) -> str:
        """How the process ended, and its last words."""
        last_words = _lines(self._errors)
        said = last_words[-1][:_SHOWN_CHARS] if last_words else "it said nothing"
        code = self._process.returncode
        how = signal_name(-code) if code is not None and code < 0 else f"exit code {code}"
        return f"the asking process ended with {how}: {said}"

    def _end(self) -> None:
        # Not reaped before: until then its number is nobody else's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)


def _take(body: Mapping[str, object], found: dict[int, StageNeed], errors: dict[int, str]) -> None:
    stage_id, need = body["stage_id"], body.get("need")
    assert isinstance(stage_id, int)
    if not isinstance(need, dict):
        errors[stage_id] = _error(str(body["error"]))
        return
    try:
        found[stage_id] = need_from_json(need)
    except (KeyError, TypeError, ValueError) as error:
        errors[stage_id] = _error(f"its engine needs what cannot be ({error})")


def _error(cause: str) -> str:
    return f"cannot forecast the stage: {cause}"


def _lines(file: IO[bytes]) -> list[str]:
    """Whole and half lines that hold something."""
    file.seek(0)
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
