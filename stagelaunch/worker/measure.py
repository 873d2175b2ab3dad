"""What a stage's engine takes of its device: the measurements of a boot, one function a term.

By the allocator's own counters, so that no neighbour shows in them. Called by ``worker.boot`` on a real device and by
``worker.forecast`` on one that only counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from stagelaunch.core.ledger import Source, Term
from stagelaunch.devices.base import Device
from stagelaunch.engines.base import Engine

TRIAL_CAPTURES = 3
"""Graphs captured, largest first, to estimate what all of them will take."""


def settle(device: Device) -> None:
    """Drop what nothing refers to any more, so that reserved bytes are what the stage keeps."""
    device.synchronize()
    gc.collect()
    device.empty_cache()


def resident(device: Device) -> Term:
    """What the stage keeps, now that everything temporary is gone; the other reading is what its tensors need."""
    settle(device)
    memory = device.memory()
    return Term(memory.reserved_bytes, Source.ALLOCATOR, memory.allocated_bytes)


def warm_up(engine: Engine, device: Device) -> Term:
    """Run the largest batch once: it pays for lazily created workspaces and compiled kernels.

    By how much reserved bytes fell when it was over: its activations, and what was done for the first time only.
    """
    device.reset_peak()
    engine.run_largest_batch()
    device.synchronize()
    peak_bytes = device.memory().peak_reserved_bytes
    settle(device)
    return Term(max(peak_bytes - device.memory().reserved_bytes, 0), Source.PROFILE)


def activations(engine: Engine, device: Device) -> Term:
    """By how much the largest batch raises reserved bytes while it runs; the other reading is of allocated bytes."""
    device.reset_peak()
    base = device.memory()
    engine.run_largest_batch()
    device.synchronize()
    peak = device.memory()
    settle(device)
    return Term(
        max(peak.peak_reserved_bytes - base.reserved_bytes, 0),
        Source.PROFILE,
        max(peak.peak_allocated_bytes - base.allocated_bytes, 0),
    )


def freeze() -> None:
    """What is there now, a loaded model, is there for good: later collections need not look at it."""
    gc.collect()
    gc.freeze()


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage is collected inside: what that frees, and when, breaks a capture. ``settle`` collects between two."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def trial_captures(engine: Engine, sizes: Sequence[int], capture: Callable[[int], int]) -> list[int]:
    """Capture the largest few sizes over a KV cache that is just large enough, then drop all of it.

    ``capture`` captures one size with the engine and returns the bytes it took.
    """
    if not sizes:
        return []
    layout = engine.kv_layout
    if layout is not None:
        engine.allocate_kv(layout.blocks_for(1))
    trials = [capture(size) for size in sizes[:TRIAL_CAPTURES]]
    engine.release_graphs()
    engine.release_kv()
    return trials
