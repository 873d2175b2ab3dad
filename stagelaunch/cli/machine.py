"""What the commands ask of this machine: which simulated one a config means, and its devices. Creates nothing."""

from __future__ import annotations

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.inventory import Inventory, SimulatedMachine


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
