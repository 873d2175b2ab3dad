"""One boot of a smoke test: before, boot, probe, stop, after. Gathers evidence; ``core.smoke`` judges it.

The boot is our own ``up`` in a process of its own, so that it is the same as any other, and so that nothing that
happens in it can take this process along.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stagelaunch.cli.background import start_in_background
from stagelaunch.cli.interrupts import Interrupted, Interrupts
from stagelaunch.cli.machine import simulated_machine
from stagelaunch.cli.probe import PROBE_TIMEOUT_S
from stagelaunch.cli.target import Target
from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.errors import ExitCode, NoDeviceError, StagelaunchError
from stagelaunch.core.inventory import DeviceInfo
from stagelaunch.core.outcome import memory_leftovers
from stagelaunch.core.service_status import stop_bound_s
from stagelaunch.core.smoke import Evidence, Probed
from stagelaunch.devices.query import query_devices_sync
from stagelaunch.supervisor.client import request
from stagelaunch.supervisor.notify import VARIABLES
from stagelaunch.system.log_file import tail
from stagelaunch.system.marked import MARK, command_of, marked_pids

INTERRUPTED_WAIT_S = 4.5
"""How long, from the first signal, an interrupted boot has to stop by itself. With ``--ci`` it needs 4 s at most."""
AGAIN_WAIT_S = 1.0
"""The same from the second signal."""
LOOK_S = 0.5
"""What looking at devices and processes may take of an interrupted test."""
SETTLE_S = 5.0
"""How long helpers may take to end after the supervisor: multiprocessing's own ends by itself."""
SLICE_S = 0.1


class TimedOutError(Exception):
    """``--timeout`` has passed."""


@dataclass
class SmokeBoot:
    """Boots ``target`` once and looks at it from all sides."""

    config: str
    target: Target
    loaded: LoadedDeployment
    runtime_dir: Path | None
    timeout_s: float | None
    """From the start to the last probe; None: the config's own deadlines alone."""
    interrupts: Interrupts
    on_line: Callable[[str], None]
    """Every line the boot says."""

    def __post_init__(self) -> None:
        self.lines: list[str] = []
        self._seen = Evidence(stages=tuple(stage.name for stage in self.loaded.deployment.stages))
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline_s: float | None = None
        self._is_ending = False
        """The boot has said its last words."""

    def run(self) -> Evidence:
        """All of it, within 6 s of an interruption. Raises nothing that a deployment can cause."""
        state_before = self.target.runtime.read_state()
        before: Mapping[int, DeviceInfo] | None = None
        try:
            with self.interrupts.armed():
                before = self._devices(self.loaded.deployment.timeouts.driver_s)
            self._boot_and_probe()
        except Interrupted:
            self._note(interrupted=True)
        except TimedOutError as error:
            self._note(exit_code=int(ExitCode.BOOT_DEADLINE), text=str(error))
        except StagelaunchError as error:
            self._note(exit_code=int(error.exit_code), text=str(error))
        if self._process is not None:
            self.end(self._process)
            self._read_ending(state_before)
            self._look_after(before)
        return self._seen

    def _note(self, **facts: Any) -> None:
        self._seen = replace(self._seen, **facts)

    def _say(self, line: str) -> None:
        self.lines.append(line)
        self.on_line(line)

    def _devices(self, timeout_s: float) -> Mapping[int, DeviceInfo]:
        """The devices that the deployment uses, as far as they are there."""
        machine = simulated_machine(self.loaded)
        inventory = query_devices_sync(self.loaded.deployment.backend, machine, timeout_s)
        used = set(self.loaded.resolve(inventory, os.environ).numbers.values())
        return {info.index: info for info in inventory.devices if info.index in used}

    def _boot_and_probe(self) -> None:
        began_s = time.monotonic()
        if self.timeout_s is not None:
            self._deadline_s = began_s + self.timeout_s
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        # Not armed: an interruption between its start and our knowing of it would leave it to itself.
        self._process, events_fd = start_in_background(
            self.target.runtime, self.config, self.runtime_dir, ["--ci"], {**environment, MARK: self._mark}, tied=True
        )
        with os.fdopen(events_fd, "rb", buffering=0) as events, self.interrupts.armed():
            if self._follow(events.fileno(), began_s):
                for stage in self._seen.stages:
                    self._probe(stage)

    def _follow(self, events_fd: int, began_s: float) -> bool:
        """Listen until every stage is ready (True) or the boot is over."""
        for event in self._events(events_fd):
            match event:
                case {"line": str(line)}:
                    self._say(line)
                case {"started": True}:
                    self._note(started=True, admission_s=time.monotonic() - began_s)
                case {"ready": {"stages": list(stages)}}:
                    self._note(bodies=_by_name(stages))
                    return True
                case {"exit": int(code), "text": str(text)}:
                    self._is_ending = True
                    self._note(exit_code=code, text=text, admission_s=self._seen.admission_s or _since(began_s))
                    return False
        return False

    def _events(self, fd: int) -> Iterator[Any]:
        buffer = b""
        while True:
            self._check_time()
            if not select.select([fd], [], [], SLICE_S)[0]:
                continue
            data = os.read(fd, 1 << 16)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            yield from map(json.loads, lines)

    def _check_time(self) -> None:
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            raise TimedOutError(f"not ready and probed within {self.timeout_s:g}s (--timeout); raise it, or see why")

    def _probe(self, stage: str) -> None:
        """One step through the stage's graph, against eager."""
        self._check_time()
        began_s = time.monotonic()
        left_s = PROBE_TIMEOUT_S if self._deadline_s is None else max(self._deadline_s - began_s, SLICE_S)
        try:
            answer = request(
                self.target.runtime, "POST", f"/v1/probe?stage={quote(stage)}", min(PROBE_TIMEOUT_S, left_s)
            )
        except StagelaunchError as failure:
            error: str | None = str(failure)
        else:
            wants_graph = bool(next(s for s in self.loaded.deployment.stages if s.name == stage).capture_sizes)
            error = probe_error(answer, wants_graph)
        self._note(probes={**self._seen.probes, stage: Probed(_since(began_s), error)})

    def end(self, process: subprocess.Popen[Any]) -> None:
        """Stop the boot and wait until ``process`` is gone; an interruption shortens it, now or meanwhile."""
        began_s = time.monotonic()
        heard = 0
        if not self._is_ending and not self.interrupts.count:
            self._ask_to_stop(process)
        deadline_s = began_s + stop_bound_s(self.loaded.deployment.timeouts)
        while process.poll() is None and time.monotonic() < deadline_s:
            if self.interrupts.count > heard:
                deadline_s = self._pass_on(process, heard, deadline_s)
                heard += 1
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SLICE_S)
        if process.poll() is None:
            # Its stages die with it, by their parent-death signals.
            self._note(text=f"its supervisor (pid {process.pid}) did not end by itself and was killed", exit_code=None)
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        self._note(stop_s=_since(began_s), interrupted=self.interrupts.count > 0)

    def _pass_on(self, process: subprocess.Popen[Any], heard: int, deadline_s: float) -> float:
        """Tell the boot of a signal that came here alone: the second one means now. Returns its new deadline."""
        first_at_s = self.interrupts.first_at_s
        assert first_at_s is not None
        if heard == 0:
            self._look_at_stages()
        process.send_signal(signal.SIGINT)
        wait_s = first_at_s + INTERRUPTED_WAIT_S if heard == 0 else time.monotonic() + AGAIN_WAIT_S
        return min(deadline_s, wait_s)

    def _look_at_stages(self) -> None:
        """How far each stage is, should nobody be left who could tell."""
        with contextlib.suppress(StagelaunchError, KeyError, TypeError):
            self._note(bodies=_by_name(request(self.target.runtime, "GET", "/v1/status", LOOK_S)["stages"]))

    def _ask_to_stop(self, process: subprocess.Popen[Any]) -> None:
        try:
            request(self.target.runtime, "POST", "/v1/down")
        except StagelaunchError:
            process.send_signal(signal.SIGTERM)

    def _read_ending(self, state_before: Mapping[str, Any]) -> None:
        """What the supervisor recorded about its end; nothing if it could not, or never owned the deployment."""
        state = self.target.runtime.read_state()
        if state == state_before or state.get("state") != "ended" or not self._seen.started:
            state = {}
        facts: dict[str, Any] = {
            "failure": state.get("first_failure"),
            "consequences": tuple(state.get("consequences") or ()),
            "leftovers": tuple(state.get("leftovers") or ()),
        }
        if state.get("stages"):
            facts["bodies"] = _by_name(state["stages"])
        if self._seen.exit_code is None:
            facts["exit_code"] = state.get("exit_code")
            if facts["exit_code"] is None and not self._seen.text:
                log = self.target.runtime.supervisor_log
                facts["text"] = "\n".join((f"its supervisor died; see {log}", *tail(log, 10)))
        self._note(**facts)

    def _look_after(self, before: Mapping[int, DeviceInfo] | None) -> None:
        """Processes and device memory against before. A kill is not a release: both get their time."""
        is_short = self._seen.interrupted
        deadline_s = time.monotonic() + (LOOK_S if is_short else SETTLE_S)
        while (alive := marked_pids(self._mark)) and time.monotonic() < deadline_s:
            time.sleep(SLICE_S / 2)
        self._note(processes=tuple(f"process {pid} is still alive: {command_of(pid)[:200]}" for pid in alive))
        if before is None or not self._seen.started:
            return
        pids = {*alive, *(body["pid"] for body in self._seen.bodies.values() if body.get("pid"))}
        limit_s = LOOK_S if is_short else self.loaded.deployment.timeouts.memory_s
        deadline_s = time.monotonic() + limit_s
        while (missing := self._missing(before, pids, limit_s)) and time.monotonic() < deadline_s:
            time.sleep(SLICE_S / 2)
        self._note(memory=missing)

    def _missing(self, before: Mapping[int, DeviceInfo], pids: set[int], limit_s: float) -> tuple[str, ...]:
        try:
            now = self._devices(min(limit_s, self.loaded.deployment.timeouts.driver_s))
        except NoDeviceError as error:
            return error.findings
        return memory_leftovers(before, now, pids, self.loaded.deployment.memory_tolerance_bytes)


def probe_error(answer: Mapping[str, Any], wants_graph: bool) -> str | None:
    """What is wrong with one stage's probe; None if its graph gives exactly what eager gives."""
    if "results" not in answer:
        return str(answer.get("error", "no answer"))
    (result,) = answer["results"]
    if result.get("error"):
        return str(result["error"])
    if wants_graph and not result["through_graph"]:
        return "it did not run through a graph, although its graphs are on"
    if result["max_abs_diff"] != 0:
        return f"its graph differs from eager by up to {result['max_abs_diff']:.3g}"
    return None


def _by_name(stages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in stages}


def _since(began_s: float) -> float:
    return time.monotonic() - began_s
