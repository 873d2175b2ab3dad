"""The captured steps of a stage: a graph per batch size, all in one pool. Used by ``decode`` and ``code2wav``."""

from __future__ import annotations

import torch

from stagelaunch.core.errors import StageError
from stagelaunch.devices.base import Device, Graph, Step


class GraphSet:
    """Captures, finds and drops the graphs of one step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[int, Graph] = {}
        self._pool: object | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, size: int, step: Step, inputs: tuple[torch.Tensor, ...]) -> None:
        """Capture ``step`` for batch ``size``. What the device raises passes through; a size twice is a StageError."""
        if size in self._graphs:
            raise StageError(f"cannot capture batch size {size}: it is captured already; list each size once")
        if self._pool is None:
            self._pool = self._device.new_graph_pool()
        self._graphs[size] = self._device.capture(step, inputs, self._pool)

    def smallest_for(self, rows: int) -> tuple[int, Graph] | None:
        """The smallest captured size that holds ``rows``, and its graph; None without one."""
        fitting = [size for size in self._graphs if size >= rows]
        return (min(fitting), self._graphs[min(fitting)]) if fitting else None

    def release(self) -> None:
        """Drop all graphs and their pool; nothing else refers to them, so their memory returns now."""
        self._graphs.clear()
        self._pool = None


def max_abs_diff(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...], rows: int) -> float:
    """The largest difference in the first ``rows`` rows of any output; NaN when one of them holds a NaN."""
    differences = [
        (left[:rows].double() - right[:rows].double()).abs().max() for left, right in zip(one, other, strict=True)
    ]
    return float(torch.stack(differences).max())
