"""The protocol a worker drives its device through. Two implementations: ``cuda`` and ``simulated``.

A worker opens one device, by UUID, and calls it from one thread. Everything a stage keeps comes from ``empty``;
everything it computes runs inside ``compute``; graphs come from ``capture``. Imported by workers only: needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from stagelaunch.devices.upload import Uploader


@dataclass(frozen=True)
class MemoryStats:
    """The process's own caching allocator, in bytes. ``reserved`` is what it holds from the device."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


Step = Callable[..., tuple[torch.Tensor, ...]]
"""A function from static input tensors to output tensors, without data-dependent control flow."""


class Graph(Protocol):
    """A captured step. Write into ``inputs`` in place, call ``replay``, read ``outputs``."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The static input tensors the step was captured with."""

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The static output tensors; overwritten by each replay."""

    def replay(self) -> None:
        """Run the captured step once; complete when it returns."""


class Device(Protocol):
    """One accelerator as this process sees it."""

    @property
    def uuid(self) -> str:
        """Identity of the device on this machine; names its lock files."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device live for torch."""

    @property
    def fills_in_place(self) -> bool:
        """Resident tensors are host memory that may be written directly, at no rate of the device's own."""

    @property
    def holds_data(self) -> bool:
        """Tensors have content. Where they do not, only memory is of interest: work that shows none may be left out."""

    def create_context(self) -> None:
        """Create the context and library handles every process pays for. Called once, before anything is allocated."""

    def process_table(self) -> Mapping[int, int | None] | None:
        """What the driver says each process holds on the device, context included, by the driver's pid.

        None for a process it lists without saying (never 0 for unknown); None instead of a table when it lists nobody.
        Needs no context.
        """

    def driver_free_bytes(self) -> int | None:
        """What the driver says is free, device-wide; needs no context. None when it does not say."""

    def total_bytes(self) -> int:
        """What the device runtime says the device has; the base of a utilization."""

    def free_bytes(self) -> int:
        """What the device runtime says is free now, device-wide."""

    def memory(self) -> MemoryStats:
        """This process's allocator."""

    def reset_peak(self) -> None:
        """Start both peaks anew from what is allocated and reserved now."""

    def empty_cache(self) -> None:
        """Give cached, unused memory back to the device."""

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised resident tensor. Raises torch.OutOfMemoryError when the device cannot give it."""

    def compute(self) -> AbstractContextManager[None]:
        """Everything computed inside is charged to the device. No gradients are recorded."""

    def new_graph_pool(self) -> object:
        """A memory pool that graphs captured one after another share."""

    def capture(self, step: Step, inputs: tuple[torch.Tensor, ...], pool: object) -> Graph:
        """Run ``step`` once eagerly, then capture it. The graph's memory is resident until the graph is dropped.

        Raises RuntimeError when the step cannot be captured (data-dependent control flow, a host sync), and
        torch.OutOfMemoryError when the device cannot hold the graph.
        """

    def copy_from_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy host memory into (part of) a resident tensor of the same shape and dtype."""

    def uploader(self) -> Uploader:
        """A queue of copies to this device, for much at a time."""

    def close(self) -> None:
        """Let go of the device. Idempotent."""
