"""The memory of a simulated device as one process sees it: a model of torch's caching allocator, without the GPU.

Tensors live in host memory; their bytes are charged to the machine's file in whole segments, as a caching allocator
asks a driver for them. It does not fragment. Used by ``simulated`` from one thread; storages may die in any. Also by
``forecast``, whose tensors have no data and whose memory has no end.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stagelaunch.core.units import MIB, format_size
from stagelaunch.devices.base import MemoryStats

SEGMENT_BYTES = 2 * MIB


def round_to_segments(size_bytes: int) -> int:
    """The whole segments that hold ``size_bytes``."""
    return -(-size_bytes // SEGMENT_BYTES) * SEGMENT_BYTES


class Memory(Protocol):
    """What a driver knows about the memory of its devices. ``simfile.SimulatedFile`` is one."""

    def allocate(self, index: int, size_bytes: int) -> bool:
        """Give this process ``size_bytes`` of device ``index``; False, and nothing given, if it has no room."""

    def free(self, index: int, size_bytes: int) -> None:
        """Take ``size_bytes`` back."""

    def total_bytes(self, index: int) -> int:
        """Capacity of the device."""

    def free_bytes(self, index: int) -> int:
        """What nobody holds."""

    def process_bytes(self, index: int) -> int:
        """What this process holds."""


class Allocator:
    """Charges live bytes to a device's memory: reserved is the high water of allocated until the cache is emptied.

    Storages can die in the middle of anything (the garbage collector runs where it likes), so their deaths are only
    noted, and booked by the next call.
    """

    def __init__(self, memory: Memory, index: int) -> None:
        self._memory = memory
        self._index = index
        self._live_bytes = 0
        self._cache_bytes = 0
        """Segments that serve tensors, used or not."""
        self._pool_bytes = 0
        """Segments that belong to graph pools."""
        self._peak_live_bytes = 0
        self._peak_allocated_bytes = 0
        self._peak_reserved_bytes = 0
        self._charged: dict[int, weakref.finalize[..., Any]] = {}
        """By storage, what books its death."""
        self._dead_bytes: deque[int] = deque()
        self._retired_pool_bytes: deque[int] = deque()
        self._paused = 0

    @property
    def paused(self) -> bool:
        """Nothing is charged now: what runs has its memory already."""
        return self._paused > 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Charge nothing inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def stats(self) -> MemoryStats:
        """The figures of torch.cuda's allocator. Graph pools count as allocated: nobody else can have them."""
        self._settle()
        return MemoryStats(
            self._allocated_bytes, self._reserved_bytes, self._peak_allocated_bytes, self._peak_reserved_bytes
        )

    def reset_peak(self) -> None:
        """Start both peaks anew."""
        self._settle()
        self._peak_allocated_bytes = self._allocated_bytes
        self._peak_reserved_bytes = self._reserved_bytes

    def empty_cache(self) -> None:
        """Give segments that hold nothing back to the device."""
        self._settle()
        unused_bytes = self._cache_bytes - round_to_segments(self._live_bytes)
        if unused_bytes > 0:
            self._memory.free(self._index, unused_bytes)
            self._cache_bytes -= unused_bytes

    def charge(self, size_bytes: int) -> None:
        """Count ``size_bytes`` as live. torch.OutOfMemoryError, and nothing charged, when the device has no room."""
        self._settle()
        self._fit_cache(self._live_bytes + size_bytes, size_bytes)
        self._live_bytes += size_bytes
        self._peak_live_bytes = max(self._peak_live_bytes, self._live_bytes)
        self._peak_allocated_bytes = max(self._peak_allocated_bytes, self._allocated_bytes)

    def charge_storage(self, storage: torch.UntypedStorage) -> None:
        """Charge a storage until it dies."""
        size_bytes = storage.nbytes()
        self.charge(size_bytes)
        self.adopt(storage, size_bytes)

    def adopt(self, storage: torch.UntypedStorage, charged_bytes: int) -> None:
        """Tie bytes that are charged already to the life of ``storage``."""
        key = storage._cdata
        self._charged[key] = on_death(storage, self._forget, key, charged_bytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Stop charging a storage that lives on: another account has it now."""
        self._charged.pop(storage._cdata).detach()
        self.refund(storage.nbytes())

    def refund(self, size_bytes: int) -> None:
        """Take back a charge that no storage was tied to."""
        self._dead_bytes.append(size_bytes)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` is charged."""
        return storage._cdata in self._charged

    def held(self) -> frozenset[int]:
        """The addresses (``_cdata``) of all storages that are charged now."""
        return frozenset(self._charged)

    @contextmanager
    def watch_peak(self) -> Iterator[Callable[[], int]]:
        """Inside, a function that tells how far live bytes rose above where they were at the start."""
        self._settle()
        base_bytes = self._peak_live_bytes = self._live_bytes
        yield lambda: self._peak_live_bytes - base_bytes

    def grow_pool(self, size_bytes: int) -> None:
        """Reserve whole segments for a graph pool. torch.OutOfMemoryError when the device has no room."""
        self._settle()
        self._reserve(lambda: size_bytes, size_bytes)
        self._pool_bytes += size_bytes
        self._note_peak()

    def retire_pool(self, size_bytes: int) -> None:
        """The segments of a pool that is gone become cache, as torch keeps them until the cache is emptied."""
        self._retired_pool_bytes.append(size_bytes)

    @property
    def _reserved_bytes(self) -> int:
        return self._cache_bytes + self._pool_bytes

    def _forget(self, key: int, size_bytes: int) -> None:
        # Atomic steps only: this runs wherever the last reference is dropped.
        self._charged.pop(key, None)
        self._dead_bytes.append(size_bytes)

    def _settle(self) -> None:
        while self._dead_bytes:
            self._live_bytes -= self._dead_bytes.popleft()
        while self._retired_pool_bytes:
            size_bytes = self._retired_pool_bytes.popleft()
            self._pool_bytes -= size_bytes
            self._cache_bytes += size_bytes

    def _fit_cache(self, live_bytes: int, tried_bytes: int) -> None:
        needed_bytes = round_to_segments(live_bytes)
        if needed_bytes > self._cache_bytes:
            self._reserve(lambda: needed_bytes - self._cache_bytes, tried_bytes)
            self._cache_bytes = needed_bytes
            self._note_peak()

    def _reserve(self, missing_bytes: Callable[[], int], tried_bytes: int) -> None:
        if self._memory.allocate(self._index, missing_bytes()):
            return
        self.empty_cache()
        if not self._memory.allocate(self._index, missing_bytes()):
            raise self._out_of_memory(tried_bytes)

    @property
    def _allocated_bytes(self) -> int:
        return self._live_bytes + self._pool_bytes

    def _note_peak(self) -> None:
        self._peak_allocated_bytes = max(self._peak_allocated_bytes, self._allocated_bytes)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self._reserved_bytes)

    def _out_of_memory(self, tried_bytes: int) -> torch.OutOfMemoryError:
        return out_of_memory(
            self._memory,
            self._index,
            tried_bytes,
            f" Of the allocated memory {format_size(self._live_bytes + self._pool_bytes)} is allocated by tensors and"
            f" graphs, and {format_size(self._cache_bytes - self._live_bytes)} is reserved but unallocated.",
        )


def out_of_memory(memory: Memory, index: int, tried_bytes: int, details: str = "") -> torch.OutOfMemoryError:
    """The error torch would raise, with the figures of the simulated device."""
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {format_size(tried_bytes)}. Simulated device {index} has a total"
        f" capacity of {format_size(memory.total_bytes(index))} of which"
        f" {format_size(memory.free_bytes(index))} is free. This process (pid {os.getpid()}) has"
        f" {format_size(memory.process_bytes(index))} memory in use.{details}"
    )


def on_death(target: object, call: Callable[..., object], *args: object) -> weakref.finalize[..., Any]:
    """Call when ``target`` dies, but not at interpreter exit, where the file gives everything back by itself."""
    finalizer = weakref.finalize(target, call, *args)
    finalizer.atexit = False
    return finalizer


def storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """The host storages of the tensors among an operator's arguments or results, lists looked into."""
    for value in values:
        if isinstance(value, torch.Tensor):
            # A meta tensor has a size but no memory.
            if value.layout is torch.strided and value.device.type == "cpu":
                yield value.untyped_storage()
        elif isinstance(value, list | tuple):
            yield from storages(value)


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator that runs inside. Subclasses override ``__torch_dispatch__``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler with the first operator: seconds of a worker's boot. Nothing compiles here.
        return False


class ActivationTracker(OperatorMode):  # type: ignore[no-untyped-call]
    """Charges every storage that an operator creates, for as long as it lives. Views and in-place results are none."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self._allocator = allocator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._allocator.paused:
            return result
        given: set[int] | None = None
        for storage in storages((result,)):
            if self._allocator.holds(storage):
                continue
            if given is None:
                given = {s._cdata for s in storages((args, tuple(kwargs.values())))}
            # A result in memory that nobody charged but that was there before: a tensor of the host.
            if storage._cdata not in given:
                self._allocator.charge_storage(storage)
        return result
