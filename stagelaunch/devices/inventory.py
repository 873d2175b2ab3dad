"""What the driver says about the devices of this machine. Needs no torch; NVML is loaded when it is asked for.

NVML can hang in the kernel: the supervisor never calls this module but runs it as a program (``query``), which reads
a JSON request on stdin and prints JSON. A worker asks it for its own memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import DeviceInfo, DeviceProcess, device_to_json
from stagelaunch.devices.simfile import list_simulated_devices

__all__ = ["free_cuda_bytes", "list_cuda_devices", "list_simulated_devices", "own_cuda_bytes"]

_NOT_AVAILABLE = 2**64 - 1
_PROCESS_TRIES = 5
"""The process table can outgrow the buffer between the driver's two answers."""


def list_cuda_devices() -> tuple[DeviceInfo, ...]:
    """Every CUDA device with its memory and processes, by the driver's index. NoDeviceError when NVML fails."""
    with _nvml() as nvml:
        return tuple(_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def own_cuda_bytes(uuid: str) -> int | None:
    """What the driver says this process holds on a device; None when it does not say, never 0 for unknown."""
    with suppress(NoDeviceError), _nvml() as nvml:
        sizes = {pid: size for pid, size in _running(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)) if size}
        # In a container the driver may know us by our number outside.
        return next((sizes[pid] for pid in (os.getpid(), *_namespace_pids()) if pid in sizes), None)
    return None


def process_table(uuid: str) -> dict[int, int | None] | None:
    """What the driver says each process holds on a device, by its pid; None when it shows no table."""
    with suppress(NoDeviceError), _nvml() as nvml:
        return dict(_running(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)))
    return None


def free_cuda_bytes(uuid: str) -> int | None:
    """What the driver says is free on a device, without creating a context there; None when it does not say."""
    with suppress(NoDeviceError), _nvml() as nvml:
        return _memory(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))[1]
    return None


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NoDeviceError(
            (
                f"cannot ask the NVIDIA driver for devices: {error}; make nvidia-smi work for this user first, or set"
                " backend: simulated",
            )
        ) from error


def _device(nvml: Any, index: int) -> DeviceInfo:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total_bytes, free_before_bytes = _memory(nvml, handle)
    processes = tuple(DeviceProcess(pid, _name(pid), size) for pid, size in _running(nvml, handle))
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


def _running(nvml: Any, handle: Any) -> list[tuple[int, int | None]]:
    try:
        try:
            found = _retried(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        except nvml.NVMLError_FunctionNotFound:
            found = _retried(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
        # A device whose processes are hidden is still a device.
        return []
    return sorted((int(process.pid), _size(process.usedGpuMemory)) for process in found)


def _retried(nvml: Any, ask: Callable[[Any], list[Any]], handle: Any) -> list[Any]:
    for _ in range(_PROCESS_TRIES - 1):
        try:
            return ask(handle)
        except nvml.NVMLError_InsufficientSize:
            continue
    return ask(handle)


def _size(size_bytes: int | None) -> int | None:
    return None if size_bytes is None or size_bytes == _NOT_AVAILABLE else int(size_bytes)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, ValueError):
        return "unknown"


def _namespace_pids() -> list[int]:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(pid) for pid in line.split()[1:]]
    return []


def main() -> int:
    """Answer one request of ``query`` with JSON on stdout: ``{"devices": [...]}`` or ``{"findings": [...]}``."""
    request = json.load(sys.stdin)
    if request["backend"] != "cuda":
        raise ValueError(f"cannot list devices of backend {request['backend']!r}: only cuda needs a process")
    try:
        answer: dict[str, Any] = {"devices": [device_to_json(info) for info in list_cuda_devices()]}
    except NoDeviceError as error:
        answer = {"findings": list(error.findings)}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
