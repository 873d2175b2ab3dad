"""``stagelaunch doctor``: can this machine boot a deployment, and if not, what is in the way?

The one side effect: the lock directory is created where it is missing, as ``up`` would; that is the only honest test.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from stagelaunch.cli.machine import list_devices, simulated_machine
from stagelaunch.config_file import LoadedDeployment, load_deployment
from stagelaunch.core.admission import claimant
from stagelaunch.core.config import Deployment
from stagelaunch.core.errors import ExitCode, LockDirectoryError, NoDeviceError
from stagelaunch.core.identity import Resolution, cuda_view
from stagelaunch.core.inventory import DeviceInfo, Inventory, SimulatedMachine, device_to_json
from stagelaunch.core.units import format_size
from stagelaunch.engines.versions import TRANSFORMERS_MINOR
from stagelaunch.supervisor.leftovers import find_leftovers
from stagelaunch.supervisor.runtime import default_runtime_dir, list_runtimes
from stagelaunch.system.claims import read_claims
from stagelaunch.system.locks import LockDirectory, holders, waiters
from stagelaunch.system.tree import describe


@dataclass(frozen=True)
class Check:
    """One thing looked at. ``exit_code`` is what the doctor ends with where it is not ok; OK for a mere warning."""

    name: str
    ok: bool
    text: str
    exit_code: ExitCode = ExitCode.OK


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Look at what this deployment would use.")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where deployments keep their sockets.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(config: Path | None, runtime_dir: Path | None, as_json: bool) -> ExitCode:
    """Check devices, driver, libraries, lock directory and leftovers of earlier runs."""
    loaded = None if config is None else load_deployment(config)
    devices, device_checks = check_devices(loaded)
    lock_dir = Path(Deployment.model_fields["lock_dir"].default) if loaded is None else loaded.lock_dir
    base = runtime_dir or (None if loaded is None else loaded.runtime_dir) or default_runtime_dir()
    checks = [
        *device_checks,
        *check_libraries(),
        *check_locks(lock_dir, devices, None if loaded is None else simulated_machine(loaded)),
        check_leftovers(base),
    ]
    click.echo(json.dumps(to_json(devices, checks), indent=2) if as_json else render(devices, checks))
    # A bad lock directory outweighs a missing device: it is wrong on any machine.
    return max((check.exit_code for check in checks if not check.ok), default=ExitCode.OK)


def check_devices(loaded: LoadedDeployment | None) -> tuple[tuple[DeviceInfo, ...], list[Check]]:
    """The devices of the backend that can be used here, and whether those the config names are among them."""
    inventory = Inventory(())
    try:
        inventory = list_devices(loaded)
        resolved = None if loaded is None else loaded.resolve(inventory, os.environ)
        devices = cuda_view(inventory, os.environ).devices if resolved is None else resolved.devices
    except NoDeviceError as error:
        return inventory.devices, [Check("devices", False, "; ".join(error.findings), ExitCode.NO_DEVICE)]
    others = [
        Check(f"device {device.uuid or device.index}", device.is_cut, f"not usable: {device.reason}")
        for device in inventory.unusable
    ]
    return devices, [_device_check(loaded, inventory, devices, resolved), *others]


def _device_check(
    loaded: LoadedDeployment | None,
    inventory: Inventory,
    devices: tuple[DeviceInfo, ...],
    resolved: Resolution | None,
) -> Check:
    backend = "cuda" if loaded is None else loaded.deployment.backend
    hidden = len(inventory.devices) - len(devices)
    note = f"; {hidden} more hidden by CUDA_VISIBLE_DEVICES" if hidden else ""
    if resolved is not None and resolved.absent:
        names = ", ".join(resolved.written[number] for number in resolved.absent)
        texts = "; ".join([f"device {names} of the config is not there{note}", *resolved.absent.values()])
        return Check("devices", False, texts, ExitCode.NO_DEVICE)
    if not devices:
        return Check("devices", False, f"no {backend} device{note}", ExitCode.NO_DEVICE)
    return Check("devices", True, f"{len(devices)} {backend}{note}")


def check_libraries() -> list[Check]:
    """torch and transformers, by their metadata: importing them takes seconds and is the workers' business."""
    return [_library("torch", None), _library("transformers", TRANSFORMERS_MINOR)]


def _library(name: str, minor: str | None) -> Check:
    if importlib.util.find_spec(name) is None:
        text = "not installed; engine qwen3-omni needs it: pip install 'stagelaunch[torch]'"
        return Check(name, False, text)
    found = importlib.metadata.version(name)
    if minor is not None and not found.startswith(f"{minor}."):
        return Check(name, False, f"{found}; engine qwen3-omni is written for {minor}")
    return Check(name, True, found)


def check_locks(lock_dir: Path, devices: tuple[DeviceInfo, ...], machine: SimulatedMachine | None) -> list[Check]:
    """The lock directory, and who is in the locks of the devices now."""
    try:
        LockDirectory(lock_dir)
    except LockDirectoryError as error:
        return [Check("lock directory", False, str(error), ExitCode.CONFIG)]
    checks = [Check("lock directory", True, str(lock_dir))]
    for info in devices:
        who = [f"held by {holder}" for holder in holders(lock_dir, info.uuid)]
        who += [f"awaited by {waiter}" for waiter in waiters(lock_dir, info.uuid)]
        if who:
            checks.append(Check(f"lock of device {info.index}", True, "; ".join(who)))
        claims = [
            f"{format_size(claim.claimed_bytes)} by {claimant(claim)}" for claim in read_claims(lock_dir, info.uuid)
        ]
        if claims:
            checks.append(Check(f"claims on device {info.index}", True, "; ".join(claims)))
    return checks


def check_leftovers(base: Path) -> Check:
    """Deployments below the runtime directory whose supervisor is gone without having said goodbye."""
    stale = [
        runtime
        for runtime in list_runtimes(base)
        if runtime.live_pid() is None and runtime.read_state().get("state") != "ended"
    ]
    if not stale:
        return Check("leftovers", True, f"none in {base}")
    names = ", ".join(str(runtime.directory) for runtime in stale)
    text = f"the supervisor of {names} ended without clean-up; the next `up` takes over"
    for runtime in stale:
        if (warden := runtime.live_warden()) is not None:
            text += f"; its warden (pid {warden}) still clears up"
        elif left := find_leftovers(runtime):
            text += f"; still there: {', '.join(map(describe, left))}"
    return Check("leftovers", False, text)


def render(devices: tuple[DeviceInfo, ...], checks: list[Check]) -> str:
    """One line per check, one per device; what is wrong starts with ``!!``."""
    lines = []
    for check in checks:
        lines.append(f"{'ok' if check.ok else '!!'}  {check.name}: {check.text}")
        if check.name == "devices":
            lines += [_device_line(info) for info in devices]
    return "\n".join(lines)


def _device_line(info: DeviceInfo) -> str:
    free, total = format_size(info.free_bytes), format_size(info.total_bytes)
    users = ", ".join(f"pid {process.pid} {process.name}".rstrip() for process in info.processes)
    return f"      {info.index} {info.name}, {free} free of {total}, {info.uuid}" + (
        f", used by {users}" if users else ""
    )


def to_json(devices: tuple[DeviceInfo, ...], checks: list[Check]) -> dict[str, Any]:
    """The same as plain JSON."""
    return {
        "ok": all(check.ok or check.exit_code is ExitCode.OK for check in checks),
        "devices": [device_to_json(info) for info in devices],
        "checks": [asdict(check) for check in checks],
    }
