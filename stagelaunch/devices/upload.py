"""How bytes get from host memory to a device: queued copies, and marks that say when a buffer may be used again.

Called by ``weights.reader`` from one thread. ``devices.cuda`` has the one that really queues; the one here copies at
once, for devices that are host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with (part of a resident tensor, host memory of the same shape and dtype); done with it on return."""


class Mark(Protocol):
    """A point in the queue of copies."""

    def wait(self) -> None:
        """Return when every copy queued before the mark is done."""


class Uploader(Protocol):
    """A queue of copies to one device. Creating one may take device memory, using it does not."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Host memory to copy from, flat uint8."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of flat bytes; ``source`` must keep them until a mark made afterwards is reached."""

    def mark(self) -> Mark:
        """The queue's end as of now."""


def _copy_now(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


class HostUploader:
    """Copies at once, by a function; nothing is ever under way."""

    def __init__(self, copy: Copy = _copy_now) -> None:
        self._copy = copy

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Ordinary host memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        self._copy(target, source)

    def mark(self) -> Mark:
        """Reached already."""
        return _REACHED


class _Reached:
    def wait(self) -> None:
        """Nothing to wait for."""


_REACHED = _Reached()
