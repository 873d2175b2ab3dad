"""Opens the device a worker was given. Imports only the backend that is asked for."""

from __future__ import annotations

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices.base import Device


def open_device(backend: str, uuid: str, machine: SimulatedMachine | None) -> Device:
    """The device called ``uuid``. NoDeviceError when it is not there. ``machine`` is for ``simulated`` only."""
    if backend == "cuda":
        from stagelaunch.devices.cuda import CudaDevice

        return CudaDevice(uuid)
    if backend == "simulated" and machine is not None:
        from stagelaunch.devices.simulated import SimulatedDevice

        for index in sorted(machine.total_bytes):
            if machine.uuid(index) == uuid:
                return SimulatedDevice(machine, index)
        there = ", ".join(machine.uuid(index) for index in sorted(machine.total_bytes)) or "none"
        raise NoDeviceError((f"cannot open device {uuid}: it is not among the simulated ones; name one of {there}",))
    raise ValueError(f"cannot open device {uuid}: backend {backend!r} is not cuda, nor simulated with its machine")
