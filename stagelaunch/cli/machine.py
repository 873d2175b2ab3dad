"""What the commands ask of this machine: which simulated one a config means, and its devices. Creates nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.claims import Claim
from stagelaunch.core.inventory import DeviceInfo, Inventory, SimulatedMachine, machine_name


def simulated_machine(loaded: LoadedDeployment) -> SimulatedMachine | None:
    """The simulated machine of a config, in the machine's one file unless the config names another; None for cuda."""
    from stagelaunch.supervisor.runtime import default_simulated_file

    return loaded.machine(default_simulated_file())


def list_devices(loaded: LoadedDeployment | None) -> Inventory:
    """The devices as they are now, of the config's backend or cuda.

    NoDeviceError when there is no driver, or nothing answers in time.
    """
    # Imported on use: with totals given by hand, a plan needs none of it.
    from stagelaunch.devices.query import INVENTORY_TIMEOUT_S, query_devices_sync

    if loaded is None:
        return query_devices_sync("cuda", None, INVENTORY_TIMEOUT_S)
    deployment = loaded.deployment
    return query_devices_sync(deployment.backend, simulated_machine(loaded), deployment.timeouts.driver_s)


def list_claims(
    lock_dir: Path, devices: Collection[DeviceInfo], machine: SimulatedMachine | None
) -> dict[int, tuple[Claim, ...]]:
    """What running deployments have claimed of these devices, by index; nothing where there is no lock directory."""
    from stagelaunch.system.claims import read_claims

    return {info.index: read_claims(lock_dir, info.uuid, machine_name(machine)) for info in devices}
