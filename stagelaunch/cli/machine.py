"""What the commands ask of this machine: which simulated one a config means, and its devices. Creates nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.claims import Claim
from stagelaunch.core.inventory import DeviceInfo, SimulatedMachine

INVENTORY_TIMEOUT_S = 30.0
"""How long the driver may take to list its devices; it can hang in the kernel."""


def simulated_machine(loaded: LoadedDeployment) -> SimulatedMachine | None:
    """The simulated machine of a config, in the machine's one file unless the config names another; None for cuda."""
    from stagelaunch.supervisor.runtime import default_simulated_file

    return loaded.machine(default_simulated_file())


def list_devices(backend: str, machine: SimulatedMachine | None) -> tuple[DeviceInfo, ...]:
    """The devices as they are now. NoDeviceError when there is no driver, or it does not answer in time."""
    # Imported on use: with totals given by hand, a plan needs none of it.
    from stagelaunch.devices.query import query_devices_sync

    return query_devices_sync(backend, machine, INVENTORY_TIMEOUT_S)


def list_claims(lock_dir: Path, devices: Collection[DeviceInfo]) -> dict[int, tuple[Claim, ...]]:
    """What running deployments have claimed of these devices, by index; nothing where there is no lock directory."""
    from stagelaunch.system.claims import read_claims

    return {info.index: read_claims(lock_dir, info.uuid) for info in devices}
