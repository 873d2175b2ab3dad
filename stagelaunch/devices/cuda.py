"""A CUDA device: torch.cuda under the names of ``base.Device``, one call a method.

The worker sees one device only (CUDA_VISIBLE_DEVICES is its UUID), so its ordinal is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.devices.base import Graph, MemoryStats, Step
from stagelaunch.devices.inventory import free_cuda_bytes, process_table
from stagelaunch.devices.upload import Mark, Uploader


@dataclass(frozen=True)
class CudaGraph:
    """A captured CUDA graph. See ``base.Graph``."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    def replay(self) -> None:
        """Run the graph and wait for it."""
        self.graph.replay()
        torch.cuda.synchronize()


class CudaUploader:
    """Copies out of pinned memory on a stream of its own. See ``upload.Uploader``."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # What is copied into was allocated, and perhaps written, on the stream of now.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory: the only kind a copy need not wait for."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the side stream."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """An event on the side stream."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return CudaMark(self._stream.record_event(event))


@dataclass(frozen=True)
class CudaMark:
    """An event. See ``upload.Mark``."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Sleep until it has happened."""
        self.event.synchronize()


class CudaDevice:
    """The one CUDA device this process sees. See ``base.Device``."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._device = torch.device("cuda", 0)
        if not torch.cuda.is_available():
            raise NoDeviceError(
                (f"cannot open device {uuid}: torch sees no CUDA device; install a CUDA build of torch and a driver",)
            )

    @property
    def uuid(self) -> str:
        """The driver's UUID."""
        return self._uuid

    @property
    def torch_device(self) -> torch.device:
        """``cuda:0``."""
        return self._device

    @property
    def fills_in_place(self) -> bool:
        """Device memory is no host memory."""
        return False

    @property
    def holds_data(self) -> bool:
        """It does."""
        return True

    def create_context(self) -> None:
        """Create the context and the handles of the BLAS libraries. NoDeviceError if it is another device's."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self._device)
        found = f"{torch.cuda.get_device_properties(self._device).uuid}"
        if found.removeprefix("GPU-") != self._uuid.removeprefix("GPU-"):
            raise NoDeviceError(
                (
                    f"cannot open device {self._uuid}: device 0 of this process is GPU-{found};"
                    f" start the worker with CUDA_VISIBLE_DEVICES={self._uuid}",
                )
            )
        for dtype in (torch.float32, torch.bfloat16):
            matrix = torch.ones(64, 64, dtype=dtype, device=self._device)
            torch.matmul(matrix, matrix)
        torch.cuda.synchronize()
        del matrix
        torch.cuda.empty_cache()

    def process_table(self) -> Mapping[int, int | None] | None:
        """NVML's compute processes of the device."""
        return process_table(self._uuid)

    def driver_free_bytes(self) -> int | None:
        """NVML's free: cudaMemGetInfo would create the context whose cost is asked for."""
        return free_cuda_bytes(self._uuid)

    def total_bytes(self) -> int:
        """Total of cudaMemGetInfo."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        """Free of cudaMemGetInfo."""
        return torch.cuda.mem_get_info(self._device)[0]

    def memory(self) -> MemoryStats:
        """The caching allocator's figures."""
        return MemoryStats(
            torch.cuda.memory_allocated(self._device),
            torch.cuda.memory_reserved(self._device),
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
        )

    def reset_peak(self) -> None:
        """Start the peaks anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def empty_cache(self) -> None:
        """Give cached, unused memory back."""
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for all queued work."""
        torch.cuda.synchronize(self._device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the device."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def compute(self) -> AbstractContextManager[None]:
        """No gradients; torch charges the device by itself."""
        return self._compute()

    def new_graph_pool(self) -> object:
        """A fresh pool handle."""
        return torch.cuda.graph_pool_handle()

    def capture(self, step: Step, inputs: tuple[torch.Tensor, ...], pool: object) -> Graph:
        """Warm up on a side stream, then capture on torch's capture stream."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad():
            with torch.cuda.stream(side):
                step(*inputs)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # thread_local: another thread of this process may allocate or synchronise meanwhile.
            with torch.cuda.graph(graph, pool=cast(Any, pool), capture_error_mode="thread_local"):
                outputs = step(*inputs)
        return CudaGraph(graph, inputs, outputs)

    def copy_from_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy; complete when it returns."""
        with torch.no_grad():
            target.copy_(source)

    def uploader(self) -> Uploader:
        """A side stream that copies out of pinned memory."""
        return CudaUploader(self._device)

    def close(self) -> None:
        """Give back what is cached; the context goes with the process."""
        torch.cuda.empty_cache()

    @contextmanager
    def _compute(self) -> Iterator[None]:
        with torch.no_grad():
            yield
