"""A simulated device: host memory with the limits, the failures and the bookkeeping of an accelerator.

Its capacity is shared with every process of the machine through ``simfile``; what this process holds is modelled by
``simmemory``, its graphs by ``simgraph``. It promises nothing about speed but an optional transfer rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices import simgraph
from stagelaunch.devices.base import Graph, MemoryStats, Step
from stagelaunch.devices.simfile import SimulatedFile
from stagelaunch.devices.simmemory import ActivationTracker, Allocator, out_of_memory
from stagelaunch.devices.upload import HostUploader, Uploader

ERROR_TEXTS = {
    46: "all CUDA-capable devices are busy or unavailable",
    214: "uncorrectable ECC error encountered",
    700: "an illegal memory access was encountered",
    719: "unspecified launch failure",
}
"""What CUDA says to the error codes that are worth injecting; any other code is reported by its number."""


class SimulatedDevice:
    """Device ``index`` of a simulated machine. See ``base.Device``.

    Opening it takes nothing; ``create_context`` charges the machine's context bytes. An error injected into the file
    makes every call that would reach a driver raise RuntimeError.
    """

    def __init__(self, machine: SimulatedMachine, index: int) -> None:
        self._machine = machine
        self._index = index
        self._file = SimulatedFile.open(machine)
        # A device that is not there is refused now, not in the first phase that needs it.
        self._total_bytes = self._file.total_bytes(index)
        self._allocator = Allocator(self._file, index)
        self._has_context = False

    @property
    def uuid(self) -> str:
        """Identity of the device on its machine."""
        return self._machine.uuid(self._index)

    @property
    def torch_device(self) -> torch.device:
        """The host: simulated memory is host memory that is counted."""
        return torch.device("cpu")

    @property
    def fills_in_place(self) -> bool:
        """Host memory, unless the machine has a transfer rate that every byte must keep to."""
        return self._machine.transfer_bytes_per_s is None

    @property
    def holds_data(self) -> bool:
        """It does."""
        return True

    def create_context(self) -> None:
        """Charge what a context costs. torch.OutOfMemoryError when the device has no room for it."""
        self._check()
        if self._has_context:
            return
        if not self._file.allocate(self._index, self._machine.context_bytes):
            raise out_of_memory(self._file, self._index, self._machine.context_bytes)
        self._has_context = True

    def process_table(self) -> Mapping[int, int | None] | None:
        """Every process of the machine that holds memory on the device."""
        self._check()
        return self._file.process_table(self._index)

    def driver_free_bytes(self) -> int | None:
        """What nobody holds now."""
        return self.free_bytes()

    def total_bytes(self) -> int:
        """Capacity of the device."""
        self._check()
        return self._total_bytes

    def free_bytes(self) -> int:
        """What nobody holds now."""
        self._check()
        return self._file.free_bytes(self._index)

    def process_bytes(self) -> int | None:
        """Exactly what was charged through this device: context, reserved memory, graphs. None without a context.

        Not of the protocol: a real driver's word for it is the process table.
        """
        self._check()
        return self._file.process_bytes(self._index) if self._has_context else None

    def memory(self) -> MemoryStats:
        """This process's allocator."""
        return self._allocator.stats()

    def reset_peak(self) -> None:
        """Start both peaks anew."""
        self._allocator.reset_peak()

    def empty_cache(self) -> None:
        """Give segments that hold nothing back."""
        self._check()
        self._allocator.empty_cache()

    def synchronize(self) -> None:
        """Nothing is ever queued; only an injected error shows here."""
        self._check()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, charged until its storage dies."""
        self._check_context()
        size_bytes = math.prod(shape) * dtype.itemsize
        # Refused before the host allocates: the device may be smaller than what the host could give.
        self._allocator.charge(size_bytes)
        try:
            with self._allocator.pause():
                tensor = torch.empty(shape, dtype=dtype)
        except BaseException:
            self._allocator.refund(size_bytes)
            raise
        self._allocator.adopt(tensor.untyped_storage(), size_bytes)
        return tensor

    def compute(self) -> AbstractContextManager[None]:
        """Everything computed inside is charged while it lives. No gradients are recorded."""
        self._check_context()
        return self._compute()

    def new_graph_pool(self) -> object:
        """A pool of this device, empty."""
        self._check_context()
        return simgraph.GraphPool(self._allocator)

    def capture(self, step: Step, inputs: tuple[torch.Tensor, ...], pool: object) -> Graph:
        """Run ``step`` once eagerly, then record it; see ``simgraph``."""
        self._check_context()
        if not isinstance(pool, simgraph.GraphPool) or not pool.belongs_to(self._allocator):
            raise TypeError("cannot capture into that pool: it is not of this device; use new_graph_pool()")
        return simgraph.capture(self._allocator, self._check_context, step, inputs, pool)

    def copy_from_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, at the machine's transfer rate where it has one."""
        self._check_context()
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"cannot copy {source.dtype} {tuple(source.shape)} into {target.dtype} {tuple(target.shape)}:"
                " shapes and dtypes differ; convert on the host first"
            )
        started_s = time.monotonic()
        with self._allocator.pause(), torch.no_grad():
            target.copy_(source)
        if self._machine.transfer_bytes_per_s is not None:
            due_s = source.nbytes / self._machine.transfer_bytes_per_s
            time.sleep(max(0.0, started_s + due_s - time.monotonic()))

    def uploader(self) -> Uploader:
        """``copy_from_host``, one copy after the other."""
        return HostUploader(self.copy_from_host)

    def close(self) -> None:
        """Give everything back, whatever tensors are still alive. Idempotent."""
        self._file.close()

    @contextmanager
    def _compute(self) -> Iterator[None]:
        with torch.no_grad(), ActivationTracker(self._allocator):
            yield

    def _check(self) -> None:
        code = self._file.error(self._index)
        if code:
            text = ERROR_TEXTS.get(code, f"unknown error {code}")
            raise RuntimeError(f"CUDA error: {text} (injected into simulated device {self._index})")

    def _check_context(self) -> None:
        self._check()
        if not self._has_context:
            raise RuntimeError(f"cannot use simulated device {self._index}: it has no context; call create_context")
