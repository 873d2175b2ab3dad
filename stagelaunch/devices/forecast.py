"""A device without memory: its tensors have shapes and no data, and what they would take is counted.

Not an accelerator: no capacity, no context cost, no file, no process but this one. It counts by the rules of the
simulated device (``simmemory``, ``simgraph``). Used by ``worker.forecast``, to say what a stage will need before it
boots.

Shapes come from torch's fake tensors. They are host tensors, also for a stage that will run on CUDA: without a driver
torch gives fake CUDA tensors the unfused attention, whose memory grows with the square of the length, where a real
device takes the fused one, as the host does. Experts take ``aten._grouped_mm`` on the host as on CUDA (compute
capability 8.0 on): one operator for all experts, its result the only memory seen.

Not counted, because no operator's result shows it: workspaces inside operators (cuDNN, cuBLAS, attention, grouped_mm),
what the driver keeps for a graph's nodes, and the fragmentation of a real caching allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stagelaunch.core.units import TIB
from stagelaunch.devices import simgraph
from stagelaunch.devices.base import Graph, MemoryStats, Step
from stagelaunch.devices.simmemory import ActivationTracker, Allocator, OperatorMode
from stagelaunch.devices.upload import HostUploader, Uploader

TOTAL_BYTES = 2**20 * TIB
"""What the device says it has, for engines that ask; nothing is ever refused."""

_INDEX = 0


class ForecastDevice:
    """See ``base.Device``. An operator that needs a tensor's value raises; torch names the operator."""

    uuid = "FORECAST"
    torch_device = torch.device("cpu")
    fills_in_place = False
    holds_data = False
    """Results mean nothing here: an engine may leave out work whose memory it has shown already."""

    def __init__(self) -> None:
        self._memory = UnlimitedMemory()
        self._allocator = Allocator(self._memory, _INDEX)
        # Host tensors that an engine mixes in are as good as their shapes.
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def create_context(self) -> None:
        """There is none; its cost is not part of a forecast."""

    def process_table(self) -> Mapping[int, int | None] | None:
        """No driver, no table."""
        return None

    def driver_free_bytes(self) -> int | None:
        """No driver."""
        return None

    def total_bytes(self) -> int:
        """More than any device has."""
        return self._memory.total_bytes(_INDEX)

    def free_bytes(self) -> int:
        """The total less what is counted."""
        return self._memory.free_bytes(_INDEX)

    def memory(self) -> MemoryStats:
        """The allocator's figures."""
        return self._allocator.stats()

    def reset_peak(self) -> None:
        """Start both peaks anew."""
        self._allocator.reset_peak()

    def empty_cache(self) -> None:
        """Give segments that hold nothing back."""
        self._allocator.empty_cache()

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without data, counted until its storage dies."""
        with self._shapes:
            tensor = torch.empty(shape, dtype=dtype)
        self._allocator.charge_storage(tensor.untyped_storage())
        return tensor

    def compute(self) -> AbstractContextManager[None]:
        """Everything computed inside is counted while it lives."""
        return self._compute()

    def new_graph_pool(self) -> object:
        """An empty pool."""
        return simgraph.GraphPool(self._allocator)

    def capture(self, step: Step, inputs: tuple[torch.Tensor, ...], pool: object) -> Graph:
        """Count what a capture of ``step`` would take; see ``simgraph``. The graph has no data to replay."""
        assert isinstance(pool, simgraph.GraphPool)

        def with_shortcuts(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with _Shortcuts():
                return step(*tensors)

        with self._shapes:
            outputs = simgraph.count(self._allocator, with_shortcuts, inputs, pool)
        return _CountedGraph(inputs, outputs, pool)

    def copy_from_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """There is nothing to copy into."""

    def uploader(self) -> Uploader:
        """Of copies that do nothing."""
        return HostUploader(self.copy_from_host)

    def close(self) -> None:
        """Nothing to let go of."""

    @contextmanager
    def _compute(self) -> Iterator[None]:
        with torch.no_grad(), self._shapes, ActivationTracker(self._allocator), _Shortcuts():
            yield


class UnlimitedMemory:
    """Counts what one process holds and never refuses. See ``simmemory.Memory``."""

    def __init__(self) -> None:
        self._held_bytes = 0

    def allocate(self, index: int, size_bytes: int) -> bool:
        """Count ``size_bytes``; always true."""
        self._held_bytes += size_bytes
        return True

    def free(self, index: int, size_bytes: int) -> None:
        """Count ``size_bytes`` less."""
        self._held_bytes -= size_bytes

    def total_bytes(self, index: int) -> int:
        """Far more than is ever counted."""
        return TOTAL_BYTES

    def free_bytes(self, index: int) -> int:
        """The total less what is held."""
        return TOTAL_BYTES - self._held_bytes

    def process_bytes(self, index: int) -> int:
        """What is held."""
        return self._held_bytes


@dataclass(frozen=True)
class _CountedGraph:
    """A graph without a step. It keeps its pool, as a real one does."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    pool: simgraph.GraphPool

    def replay(self) -> None:
        raise RuntimeError("cannot replay a graph of a forecast: its tensors have no data")


class _Shortcuts(OperatorMode):  # type: ignore[no-untyped-call]
    """Operators that need not, or cannot, go to the fake tensors. Entered last, so that it is asked first."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            # Asked as often as all operators together.
            return torch.device("cpu")
        # torch's own shape rule takes bfloat16 only, its host kernel takes every dtype.
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            rows, experts = args[:2]
            if (rows.dim(), experts.dim()) == (2, 3):
                return rows.new_empty(rows.shape[0], experts.shape[2])
        return func(*args, **(kwargs or {}))
