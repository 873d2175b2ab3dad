"""How weights are to be read, and what may be decided about it without looking at a file or a clock.

``weights.reader`` asks with what it has found; ``core.config`` and ``core.engine_spec`` carry the wishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stagelaunch.core.units import MIB

CHUNK_BYTES = 32 * MIB
"""Most bytes one read asks for: long runs, because threads that take turns in short ones upset the kernel's reading
ahead."""

BUFFER_BYTES = 16 * MIB
"""The same for a read into the ring: a buffer's size."""

MAX_THREADS = 64
AUTO_THREADS = 8
"""More do not read faster: eight fill a fast disk, and copy out of the page cache faster than any link takes it."""

IN_FLIGHT = 2
"""Buffers whose copy to the device may be under way while the next ones are read."""

_RING_SHARE = 8
"""The ring takes at most this part of the memory that may be used."""


class Backend(StrEnum):
    """What reads the files."""

    AUTO = "auto"
    """Buffered, or direct where that is better."""
    BUFFERED = "buffered"
    DIRECT = "direct"
    SAFETENSORS = "safetensors"
    INSTANTTENSOR = "instanttensor"

    @property
    def module(self) -> str | None:
        """The package it needs; None for our own readers."""
        return self.value if self in (Backend.SAFETENSORS, Backend.INSTANTTENSOR) else None


@dataclass(frozen=True)
class Reading:
    """A stage's wishes."""

    backend: Backend = Backend.AUTO
    threads: int | None = None
    """None: by the number of CPUs."""


def threads_for(asked: int | None, cpus: int, reads: int) -> int:
    """Threads that read; never more than there are reads."""
    return max(1, min(asked or min(cpus, AUTO_THREADS), reads))


def ring_buffers(threads: int, usable_bytes: int | None) -> int:
    """Buffers of the ring: one for each thread and those in flight, less where memory is short, but two.

    ``usable_bytes``: what may be used; None where that is not known.
    """
    wanted = threads + IN_FLIGHT
    if usable_bytes is None:
        return wanted
    return max(2, min(wanted, usable_bytes // _RING_SHARE // BUFFER_BYTES))


def bypasses_cache(total_bytes: int, resident_bytes: int, usable_bytes: int | None) -> bool:
    """Whether the page cache is better left out: most of it is not there, and it would not fit there either.

    Through the cache a read costs one copy more, but the next boot, and a neighbour with the same file, find it warm.
    """
    if usable_bytes is None or 2 * resident_bytes >= total_bytes:
        return False
    return total_bytes - resident_bytes > usable_bytes
