"""What is known about the devices of this machine, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DeviceProcess:
    """A process that holds memory on a device. ``size_bytes`` is None where the driver does not say."""

    pid: int
    name: str
    size_bytes: int | None


@dataclass(frozen=True)
class DeviceInfo:
    """One device: ``uuid`` is its identity, ``index`` its number within one run, sizes in bytes.

    The number is for people: the driver's changes when a card falls off the bus, and CUDA_VISIBLE_DEVICES renumbers.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    processes: tuple[DeviceProcess, ...] = ()


@dataclass(frozen=True)
class UnusableDevice:
    """A device that is there and cannot be used, and why: it cannot be read, or it is cut into MIG devices."""

    index: int
    uuid: str | None
    """None where the driver did not even say this."""
    name: str | None
    reason: str
    """What follows "but": ``it cannot be read: GPU is lost``."""
    is_cut: bool = False
    """It is in MIG mode, which is no fault."""


@dataclass(frozen=True)
class Inventory:
    """What a machine has: the devices that can be used, by index, and the others."""

    devices: tuple[DeviceInfo, ...]
    unusable: tuple[UnusableDevice, ...] = ()


@dataclass(frozen=True)
class SimulatedMachine:
    """The simulated devices of a machine: one file holds them all, whoever uses it."""

    path: Path
    total_bytes: Mapping[int, int]
    """Capacity by device index."""
    context_bytes: int
    """What every process pays for its context."""
    transfer_bytes_per_s: float | None = None
    """Rate of host-to-device copies; None: as fast as memory."""

    def uuid(self, index: int) -> str:
        """Identity of a simulated device; the same for every process of the machine."""
        return simulated_uuid(index)


def machine_name(machine: SimulatedMachine | None) -> str:
    """What tells the devices of one simulated machine from those of another, with equal UUIDs; "" for real ones."""
    return "" if machine is None else str(machine.path)


def simulated_uuid(index: int) -> str:
    """``SIM-00000000-0000-0000-0000-000000000001`` for device 1."""
    return f"SIM-00000000-0000-0000-0000-{index:012x}"


def device_to_json(info: DeviceInfo) -> dict[str, Any]:
    """Plain JSON of a device."""
    return {
        "index": info.index,
        "uuid": info.uuid,
        "name": info.name,
        "total_bytes": info.total_bytes,
        "free_bytes": info.free_bytes,
        "processes": [{"pid": p.pid, "name": p.name, "size_bytes": p.size_bytes} for p in info.processes],
    }


def device_from_json(body: Mapping[str, Any]) -> DeviceInfo:
    """Inverse of ``device_to_json``."""
    return DeviceInfo(
        index=int(body["index"]),
        uuid=str(body["uuid"]),
        name=str(body["name"]),
        total_bytes=int(body["total_bytes"]),
        free_bytes=int(body["free_bytes"]),
        processes=tuple(DeviceProcess(int(p["pid"]), str(p["name"]), p["size_bytes"]) for p in body["processes"]),
    )


def inventory_to_json(inventory: Inventory) -> dict[str, Any]:
    """Plain JSON of an inventory."""
    return {
        "devices": [device_to_json(info) for info in inventory.devices],
        "unusable": [asdict(device) for device in inventory.unusable],
    }


def inventory_from_json(body: Mapping[str, Any]) -> Inventory:
    """Inverse of ``inventory_to_json``."""
    return Inventory(
        tuple(device_from_json(device) for device in body["devices"]),
        tuple(UnusableDevice(**device) for device in body["unusable"]),
    )
