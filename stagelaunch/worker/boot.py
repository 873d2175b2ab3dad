"""The boot of one stage inside its own process: each phase under the lock its table names, every byte measured.

Decides nothing about memory: what is measured here becomes terms of ``core.ledger``, which does the arithmetic.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from stagelaunch.core.errors import BudgetOvershootError, StageError
from stagelaunch.core.ledger import Ledger, Source, Term, close_ledger, estimate_graphs
from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.core.run_spec import StageRun
from stagelaunch.core.units import format_size
from stagelaunch.devices.base import Device
from stagelaunch.engines.base import Engine, EngineSpec
from stagelaunch.system.locks import DeviceLocks, Holder
from stagelaunch.worker.reporter import Reporter

TRIAL_CAPTURES = 3
"""Graphs captured, largest first, to estimate what all of them will take."""


def engine_spec(run: StageRun) -> EngineSpec:
    """The part of a run the engine needs."""
    return EngineSpec(
        component=run.component,
        model_dir=run.model_dir,
        dtype=run.dtype,
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=run.max_num_batched_tokens,
        max_model_len=run.max_model_len,
        block_size=run.block_size,
        capture_sizes=run.capture_sizes,
        options=run.options,
    )


class Boot:
    """Walks one engine on one device from context to captured graphs. ``walk`` is called once."""

    def __init__(self, run: StageRun, engine: Engine, device: Device, locks: DeviceLocks, reporter: Reporter) -> None:
        self._run = run
        self._engine = engine
        self._device = device
        self._locks = locks
        self._reporter = reporter

    def walk(self) -> Ledger:
        """Context, load, profile, size, allocate, capture. Returns the final ledger, graphs measured."""
        reporter = self._reporter
        with reporter.phase(Phase.CONTEXT), self._lock(LockMode.EXCLUSIVE):
            context = self._create_context()
        with reporter.phase(Phase.LOAD):
            weights = self._load()
        with reporter.phase(Phase.PROFILE), self._lock(LockMode.EXCLUSIVE):
            activations, non_torch, graphs = self._profile(context)
        with reporter.phase(Phase.SIZE):
            ledger = close_ledger(
                budget=self._budget(),
                context=context,
                weights=weights,
                activations=activations,
                non_torch=non_torch,
                graphs=graphs,
                layout=self._engine.kv_layout,
                max_model_len=self._run.max_model_len,
            )
            reporter.ledger(ledger, final=False)
        with reporter.phase(Phase.ALLOCATE), self._lock(LockMode.EXCLUSIVE):
            self._allocate(ledger)
        with reporter.phase(Phase.CAPTURE), self._lock(LockMode.SHARED):
            ledger = replace(ledger, graphs=self._capture())
        self._check_budget(ledger)
        reporter.ledger(ledger, final=True)
        return ledger

    @contextmanager
    def _lock(self, mode: LockMode) -> Iterator[None]:
        reporter = self._reporter

        def waits(holders: tuple[Holder, ...]) -> None:
            reporter.lock_waits(mode, tuple(str(holder) for holder in holders))

        began_s = reporter.now()
        with self._locks.hold(mode, phase=reporter.current, timeout_s=self._run.lock_timeout_s, on_wait=waits):
            reporter.lock_taken(mode, reporter.now() - began_s)
            yield

    def _budget(self) -> Term:
        if self._run.budget_bytes is not None:
            return Term(self._run.budget_bytes, Source.CONFIG_BUDGET)
        assert self._run.utilization is not None
        return Term(int(self._run.utilization * self._device.total_bytes()), Source.CONFIG_UTILIZATION)

    def _create_context(self) -> Term:
        change = self._device.create_context()
        own = self._device.process_bytes()
        if own is not None:
            return Term(own - self._device.memory().reserved_bytes, Source.OWN_FIGURE)
        if change is None:
            raise StageError(
                "cannot measure what the device context takes: the driver reports neither this process's memory nor "
                "free memory before the context; give the driver's process accounting to this user or container"
            )
        return Term(change, Source.FREE_DELTA)

    def _load(self) -> Term:
        with self._lock(LockMode.SHARED):
            self._engine.allocate_weights(self._device)
        self._engine.read_weights(lambda done, total: self._reporter.progress(done, total, "bytes"))
        self._settle()
        return Term(self._device.memory().reserved_bytes, Source.ALLOCATOR)

    def _settle(self) -> None:
        """Drop what nothing refers to any more, so that reserved bytes are what the stage keeps."""
        self._device.synchronize()
        gc.collect()
        self._device.empty_cache()

    def _profile(self, context: Term) -> tuple[Term, Term, Term]:
        """Activation peak, non-torch growth and the graph estimate. Runs under the exclusive lock."""
        device = self._device
        free_before = device.free_bytes() + device.memory().reserved_bytes
        # The first run pays for lazily created workspaces and compiled kernels; only the second is measured.
        self._engine.run_largest_batch()
        self._settle()
        device.reset_peak()
        self._engine.run_largest_batch()
        device.synchronize()
        peak = device.memory().peak_reserved_bytes
        self._settle()
        activations = Term(max(peak - device.memory().reserved_bytes, 0), Source.PROFILE)
        return activations, self._non_torch(context, free_before), self._estimate_graphs()

    def _non_torch(self, context: Term, free_before: int) -> Term:
        own = self._device.process_bytes()
        reserved = self._device.memory().reserved_bytes
        if own is not None and context.source is Source.OWN_FIGURE:
            return Term(max(own - reserved - context.size_bytes, 0), Source.OWN_FIGURE)
        return Term(max(free_before - self._device.free_bytes() - reserved, 0), Source.FREE_DELTA)

    def _estimate_graphs(self) -> Term:
        """Capture the largest few graphs over a KV cache that is just large enough, measure, drop all of it."""
        sizes = self._run.capture_sizes
        if not sizes:
            return Term(0, Source.NONE)
        layout = self._engine.kv_layout
        if layout is not None:
            self._engine.allocate_kv(layout.blocks_for(1))
        trials = [self._capture_one(size) for size in sizes[:TRIAL_CAPTURES]]
        self._engine.release_graphs()
        self._engine.release_kv()
        self._settle()
        return Term(estimate_graphs(trials, len(sizes)), Source.ESTIMATE)

    def _capture_one(self, size: int) -> int:
        """Capture one size; the bytes it took, by the driver's figure of this process or else by the allocator's."""
        device = self._device
        own_before, reserved_before = device.process_bytes(), device.memory().reserved_bytes
        self._engine.capture(size)
        self._settle()
        own_after, reserved_after = device.process_bytes(), device.memory().reserved_bytes
        if own_before is None or own_after is None:
            return reserved_after - reserved_before
        return own_after - own_before

    def _allocate(self, ledger: Ledger) -> None:
        if ledger.num_blocks == 0:
            return
        free = self._device.free_bytes()
        if free < ledger.kv.size_bytes:
            raise StageError(
                f"cannot allocate {ledger.num_blocks} KV blocks: they take {format_size(ledger.kv.size_bytes)} and "
                f"device {self._run.device_index} has {format_size(free)} free; another process holds memory this "
                f"stage's budget counts on: stop it, or lower the budget"
            )
        self._engine.allocate_kv(ledger.num_blocks)

    def _capture(self) -> Term:
        sizes = self._run.capture_sizes
        if not sizes:
            return Term(0, Source.NONE)
        total = 0
        for done, size in enumerate(sizes):
            self._reporter.progress(done, len(sizes), "graphs")
            total += self._capture_one(size)
        self._reporter.progress(len(sizes), len(sizes), "graphs")
        return Term(max(total, 0), Source.MEASURED)

    def _check_budget(self, ledger: Ledger) -> None:
        over = ledger.used_bytes - ledger.budget.size_bytes
        if over > 0:
            figures = ", ".join(f"{name} {format_size(term.size_bytes)}" for name, term in ledger.rows())
            raise BudgetOvershootError(
                f"cannot keep the stage within its budget: with its graphs captured it takes {format_size(over)} more "
                f"than it was given ({figures}); raise the budget by that much or capture fewer graphs"
            )
