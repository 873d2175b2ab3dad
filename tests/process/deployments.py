"""Deployments for process tests: in a directory of their own, run by the real command, checked for leftovers."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import pytest
import yaml

from stagelaunch.config_file import load_deployment
from stagelaunch.core.inventory import DeviceInfo, SimulatedMachine
from stagelaunch.devices.inventory import list_simulated_devices
from stagelaunch.system.locks import holders
from stagelaunch.system.tree import find_run

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PID = re.compile(r"\(pid (\d+)\)")
TIMEOUT_S = 90.0


in_full_only = pytest.mark.skipif(
    not os.environ.get("STAGELAUNCH_SOAK"), reason="in full runs only: set STAGELAUNCH_SOAK=1"
)
"""Marks a slow test of what a quicker one shows as well."""


def light_stage(stage_id: int, name: str, device: int, **more: Any) -> dict[str, Any]:
    return {
        "id": stage_id,
        "name": name,
        "component": name,
        "engine": "light_engine:LightEngine",
        "devices": [device],
        "utilization": 0.4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "env": {"OMP_NUM_THREADS": "1"},
        **more,
    }


def three_stages() -> list[dict[str, Any]]:
    return [light_stage(0, "alpha", 0), light_stage(1, "beta", 1), light_stage(2, "gamma", 1)]


def is_gone(pid: int) -> bool:
    """Whether the process is dead, or dies within seconds: a SIGKILL that was sent takes its moment."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 5)[0])
    finally:
        os.close(fd)


class Command(subprocess.Popen[str]):
    """A command whose output may be read line by line before the rest is."""

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """The rest. The standard one knows nothing of what was read ahead for the lines before: it would be lost."""
        rest = ["", ""]

        def read(number: int, stream: IO[str]) -> None:
            rest[number] = stream.read()

        streams = [
            (n, each) for n, each in enumerate((self.stdout, self.stderr)) if each is not None and not each.closed
        ]
        threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        for _, stream in streams:
            stream.close()
        self.wait(timeout)
        return rest[0], rest[1]


@dataclass
class Site:
    """One deployment with files of its own: config, locks, runtime directory and simulated devices."""

    directory: Path
    stages: list[dict[str, Any]] = field(default_factory=three_stages)
    top: dict[str, Any] = field(default_factory=dict)
    engines: Path = HERE
    """Where its engines are imported from."""

    @property
    def config(self) -> Path:
        return self.directory / "site.yaml"

    def write(self) -> Path:
        body = {
            "name": "site",
            "model": "model",
            "backend": "simulated",
            "reserve": "16MiB",
            "simulated": {"devices": {0: "1GiB", 1: "1GiB"}, "file": "devices"},
            "lock_dir": "locks",
            "runtime_dir": "run",
            "timeouts": {"phase": "30s", "stage": "50s", "boot": "70s", "lock": "40s", "stop": "3s", "memory": "3s"},
            "stages": self.stages,
            **self.top,
        }
        self.config.write_text(yaml.safe_dump(body))
        return self.config

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.engines), "COLUMNS": "200"}

    def start(self, *arguments: str) -> Command:
        command = [sys.executable, "-m", "stagelaunch", *arguments]
        return Command(
            command, cwd=ROOT, env=self.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, *arguments: str) -> Ran:
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        return Ran(process.returncode, stdout, stderr)

    def up(self, *options: str) -> Ran:
        return self.run("up", str(self.write()), *options)

    def machine(self) -> SimulatedMachine:
        machine = load_deployment(self.config).machine(self.directory / "devices")
        assert machine is not None
        return machine

    def devices(self) -> dict[int, DeviceInfo]:
        return {info.index: info for info in list_simulated_devices(self.machine())}

    def state(self) -> Mapping[str, Any]:
        body: dict[str, Any] = json.loads((self.directory / "run" / "site" / "state.json").read_text())
        return body

    def assert_nothing_left(
        self, ran: Ran, foreign: Mapping[int, int] = MappingProxyType({}), *, supervisor_was_killed: bool = False
    ) -> None:
        """No process of the boot lives, no device byte is held, no lock is held, no socket or record is left.

        But for ``foreign`` bytes by device. Of a supervisor that was killed, files that nobody believes may be left.
        """
        run_id = self.state().get("run_id")
        assert run_id is None or all(is_gone(process.pid) for process in find_run(run_id))
        assert [pid for pid in ran.pids if not is_gone(pid)] == []
        for info in self.devices().values():
            assert (info.free_bytes, info.processes) == (info.total_bytes - foreign.get(info.index, 0), ())
            assert holders(self.directory / "locks", info.uuid) == ()
        if supervisor_was_killed:
            return
        assert {path.suffix for path in (self.directory / "locks").iterdir()} <= {".gate", ".data", ".lock"}
        assert not (self.directory / "run" / "site" / "control.sock").exists()


@dataclass(frozen=True)
class Ran:
    """A command that is over."""

    code: int
    stdout: str
    stderr: str

    @property
    def pids(self) -> set[int]:
        return {int(pid) for pid in PID.findall(self.stderr)}
