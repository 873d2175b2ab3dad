"""What the commands ask of this machine: which simulated one a config means, and its devices. Creates nothing."""

from __future__ import annotations

from stagelaunch.config_file import LoadedDeployment
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
