"""What the driver says about the devices of this machine. Needs no torch; NVML is loaded when it is asked for.

NVML can hang in the kernel: the supervisor never calls this module but runs it as a program (``query``), which reads
a JSON request on stdin and prints JSON. It asks each device in a thread of its own, so that one that hangs does not
keep the others from being told. A worker asks this module for its own memory.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import DeviceInfo, DeviceProcess, Inventory, UnusableDevice, inventory_to_json
from stagelaunch.core.units import format_duration
from stagelaunch.devices.simfile import list_simulated_devices

__all__ = [
    "cuda_inventory",
    "free_cuda_bytes",
    "list_cuda_devices",
    "list_simulated_devices",
    "process_table",
]

_NOT_AVAILABLE = 2**64 - 1
_PROCESS_TRIES = 5
"""The process table can outgrow the buffer between the driver's two answers."""


_DEFAULT_TIMEOUT_S = 30.0


def list_cuda_devices() -> tuple[DeviceInfo, ...]:
    """Every CUDA device that can be used, with its memory and processes. NoDeviceError when there is no answer."""
    return cuda_inventory(_DEFAULT_TIMEOUT_S, time.monotonic() + _DEFAULT_TIMEOUT_S).devices


def cuda_inventory(timeout_s: float, deadline_s: float, uuids: Sequence[str] = ()) -> Inventory:
    """Every CUDA device, or those of ``uuids``, with their memory and processes, by the driver's index.

    One that does not answer by ``deadline_s`` (monotonic; the end of ``timeout_s``), or with an error, is told as
    unusable. MIG devices stand for the GPU they are part of, numbered after the GPUs. NoDeviceError when nothing can
    be read. A thread that hangs in the driver is left behind, and NVML stays loaded: for a process that ends soon.
    """
    with _library() as nvml:
        nvml.nvmlInit()
        asked = [_Asked(nvml, at, uuid) for at, uuid in enumerate(uuids)] or [
            _Asked(nvml, index, None) for index in range(nvml.nvmlDeviceGetCount())
        ]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return _inventory([thread.answer(timeout_s) for thread in asked])


class _Asked(threading.Thread):
    """One device being asked. What it has told so far can be read at any time."""

    def __init__(self, nvml: Any, index: int, uuid: str | None) -> None:
        super().__init__(daemon=True)
        self._nvml = nvml
        self._index = index
        self._uuid = uuid
        self._name: str | None = None
        self._devices: tuple[DeviceInfo, ...] | None = None
        self._is_cut = False
        self._error: str | None = None

    def run(self) -> None:
        """Ask for identity first, so that a device that fails later can be named."""
        nvml = self._nvml
        try:
            if self._uuid is None:
                handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
                self._uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            self._name = _text(nvml.nvmlDeviceGetName(handle))
            parts = _mig_handles(nvml, handle)
            self._is_cut = parts is not None
            self._devices = tuple(_device(nvml, part, self._index) for part in ([handle] if parts is None else parts))
        except Exception as error:  # whatever it is, it is this device's and nobody else's
            self._error = f"{error}" or repr(error)

    def answer(self, timeout_s: float) -> Inventory:
        """The device; its MIG devices, itself unusable; or why nothing of it can be used."""
        devices = self._devices
        if devices is not None and not self._is_cut:
            return Inventory(devices)
        if devices is not None:
            reason = f"it is in MIG mode; {_mig_hint(devices)}"
        elif self._error is None:
            reason = f"the driver did not answer in {format_duration(timeout_s)}; check dmesg and nvidia-smi"
        else:
            reason = f"it cannot be read: {self._error}; check dmesg and nvidia-smi"
        whole = UnusableDevice(self._index, self._uuid, self._name, reason, is_cut=devices is not None)
        return Inventory(devices or (), (whole,))


def _mig_hint(devices: Sequence[DeviceInfo]) -> str:
    uuids = ", ".join(info.uuid for info in devices)
    return f"name one of its MIG devices ({uuids})" if uuids else "create a MIG device on it, or turn the mode off"


def _inventory(answers: Sequence[Inventory]) -> Inventory:
    whole = [info for answer in answers if not _is_cut(answer) for info in answer.devices]
    parts = [info for answer in answers if _is_cut(answer) for info in answer.devices]
    unusable = tuple(device for answer in answers for device in answer.unusable)
    if answers and not whole and not any(map(_is_cut, answers)):
        raise NoDeviceError(tuple(f"cannot use device {_label(device)}: {device.reason}" for device in unusable))
    numbered = (replace(info, index=len(answers) + place) for place, info in enumerate(parts))
    return Inventory((*whole, *numbered), unusable)


def _label(device: UnusableDevice) -> str:
    return f"{device.index}" if device.uuid is None else f"{device.index} ({device.uuid})"


def _is_cut(answer: Inventory) -> bool:
    return any(device.is_cut for device in answer.unusable)


def process_table(uuid: str) -> dict[int, int | None] | None:
    """What each process holds on a device, in bytes by pid as the driver knows it; None where it does not say.

    Also for a MIG device. None when the driver does not tell who uses the device at all.
    """
    with suppress(NoDeviceError), _nvml() as nvml:
        found = _table(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        return None if found is None else _by_pid(found)
    return None


def _by_pid(found: Sequence[tuple[int, int | None]]) -> dict[int, int | None]:
    """One figure for a process that is listed several times: the sum, unknown where a part of it is."""
    sizes: dict[int, int | None] = {}
    for pid, size in found:
        before = sizes.get(pid, 0)
        sizes[pid] = None if before is None or size is None else before + size
    return sizes


def free_cuda_bytes(uuid: str) -> int | None:
    """What the driver says is free on a device, without creating a context there; None when it does not say."""
    with suppress(NoDeviceError), _nvml() as nvml:
        return _memory(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))[1]
    return None


@contextmanager
def _nvml() -> Iterator[Any]:
    with _library() as nvml:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()


@contextmanager
def _library() -> Iterator[Any]:
    import pynvml

    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise NoDeviceError(
            (
                f"cannot ask the NVIDIA driver for devices: {error}; make nvidia-smi work for this user first, or set"
                " backend: simulated",
            )
        ) from error


def _mig_handles(nvml: Any, handle: Any) -> list[Any] | None:
    """The MIG devices of a GPU; None for one that is not in MIG mode."""
    unsupported = (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_InvalidArgument)
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
    except unsupported:
        return None
    found = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # Places are given once and leave gaps when an instance goes.
        with suppress(nvml.NVMLError_NotFound):
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
    return found


def _device(nvml: Any, handle: Any, index: int) -> DeviceInfo:
    total_bytes, free_before_bytes = _memory(nvml, handle)
    processes = tuple(DeviceProcess(pid, _name(pid), size) for pid, size in _table(nvml, handle) or ())
    # What a process took between the two answers must not look both free and held.
    free_bytes = min(free_before_bytes, _memory(nvml, handle)[1])
    return DeviceInfo(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        processes=processes,
    )


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Total and free; what the driver keeps for itself belongs to neither where it tells."""
    unsupported = (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except unsupported:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.free)
    return int(memory.total) - int(memory.reserved), int(memory.free)


def _table(nvml: Any, handle: Any) -> list[tuple[int, int | None]] | None:
    """Pids and bytes; None where the driver hides or fails to give them: a device whose users are not known is one."""
    try:
        try:
            found = _retried(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        except nvml.NVMLError_FunctionNotFound:
            found = _retried(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    except nvml.NVMLError_GpuIsLost:
        raise
    except nvml.NVMLError:
        return None
    return sorted(((int(process.pid), _size(process.usedGpuMemory)) for process in found), key=lambda item: item[0])


def _retried(nvml: Any, ask: Callable[[Any], list[Any]], handle: Any) -> list[Any]:
    for _ in range(_PROCESS_TRIES - 1):
        try:
            return ask(handle)
        except nvml.NVMLError_InsufficientSize:
            continue
    return ask(handle)


def _size(size_bytes: int | None) -> int | None:
    # A process on the list holds a context at least: 0 is a driver that does not say.
    return None if not size_bytes or size_bytes == _NOT_AVAILABLE else int(size_bytes)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, ValueError):
        return "unknown"


def main() -> int:
    """Answer one request of ``query`` with a line of JSON on stdout: an inventory, or ``{"findings": [...]}``."""
    request = json.load(sys.stdin)
    if request["backend"] != "cuda":
        raise ValueError(f"cannot list devices of backend {request['backend']!r}: only cuda needs a process")
    timeout_s = request.get("timeout_s", _DEFAULT_TIMEOUT_S)
    deadline_s = request.get("deadline_s", time.monotonic() + timeout_s)
    try:
        answer = inventory_to_json(cuda_inventory(timeout_s, deadline_s, request.get("uuids", ())))
    except NoDeviceError as error:
        answer = {"findings": list(error.findings)}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
