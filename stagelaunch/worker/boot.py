"""The boot of one stage inside its own process: each phase under the lock its table names, every byte measured.

Decides nothing about memory: what is measured here becomes terms of ``core.ledger``, which does the arithmetic. Whose
memory is whose is told by ``worker.own_memory``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from stagelaunch.core.attribution import VERIFY_BYTES
from stagelaunch.core.errors import BudgetOvershootError, BudgetTooSmallError, RememberedPlanError, StageError
from stagelaunch.core.ledger import KVLayout, Ledger, Source, Term, estimate_graphs, figures, fill_ledger, shortage
from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.core.remembered import Readings, broken, outgrown, same_activations, sized_by, unusable
from stagelaunch.core.run_spec import StageRun
from stagelaunch.core.units import format_size
from stagelaunch.devices.base import Device
from stagelaunch.engines.base import Engine
from stagelaunch.system.locks import DeviceLocks, Holder
from stagelaunch.system.process import own_pids
from stagelaunch.worker import measure
from stagelaunch.worker.own_memory import OwnMemory
from stagelaunch.worker.reporter import Reporter


class Boot:
    """Walks one engine on one device from context to captured graphs. ``walk`` is called once.

    ``on_identity`` hears the pid under which the driver knows this process; None where that cannot be told.
    """

    def __init__(
        self,
        run: StageRun,
        engine: Engine,
        device: Device,
        locks: DeviceLocks,
        reporter: Reporter,
        on_identity: Callable[[int | None], None] = lambda pid: None,
    ) -> None:
        self._run = run
        self._engine = engine
        self._device = device
        self._locks = locks
        self._reporter = reporter
        self._on_identity = on_identity
        self._memory = OwnMemory(device, own_pids())

    def walk(self) -> Ledger:
        """Context, load, profile, size, allocate, capture. Returns the final ledger, graphs measured."""
        reporter = self._reporter
        with reporter.phase(Phase.CONTEXT), self._lock(LockMode.EXCLUSIVE):
            context = self._create_context()
        with reporter.phase(Phase.LOAD):
            self._load()
        measure.freeze()
        plan = self._usable_plan(context)
        ledger = self._measured(context) if plan is None else self._recalled(plan, context)
        with reporter.phase(Phase.ALLOCATE), self._lock(LockMode.EXCLUSIVE):
            ledger = replace(ledger, kv=self._allocate(ledger))
        with reporter.phase(Phase.CAPTURE):
            graphs = self._capture(ledger.graphs_estimate_bytes)
            ledger = replace(ledger, graphs=graphs, held_bytes=self._memory.held_bytes())
            if plan is not None:
                _refuse_plan(broken(plan, ledger))
        self._check_budget(ledger)
        reporter.ledger(ledger, final=True)
        return ledger

    def _measured(self, context: Term) -> Ledger:
        """Everything measured, and the KV cache sized by it."""
        with self._reporter.phase(Phase.PROFILE):
            weights, activations, non_torch, graphs = self._profile()
        with self._reporter.phase(Phase.SIZE):
            layout = self._engine.kv_layout
            ledger = fill_ledger(
                budget=self._budget(),
                context=context,
                weights=weights,
                activations=activations,
                non_torch=non_torch,
                graphs=graphs,
                layout=layout,
            )
            self._check_size(ledger, layout)
            self._reporter.ledger(ledger, final=False)
        return ledger

    def _usable_plan(self, context: Term) -> Ledger | None:
        """What to boot by instead of measuring; None: measure, and say why in the log."""
        plan = self._run.plan
        if plan is None:
            return None
        device = self._device
        why = unusable(
            plan,
            self._budget().size_bytes,
            self._engine.kv_layout,
            context.size_bytes,
            device.free_bytes(),
            device.memory().reserved_bytes,
        )
        if why is None:
            return plan
        print(f"measures, although its plan is remembered: {why}", flush=True)
        return None

    def _recalled(self, plan: Ledger, context: Term) -> Ledger:
        """The KV cache sized by the plan, after one run of the largest batch: captures need what that creates."""
        # Shared: no reading below has a neighbour in it, and a neighbour that measures is not disturbed. Where the
        # driver tells nothing of this process, what libraries take is a change of free memory: then nobody else.
        untold = self._memory.grown() is None
        with (
            self._reporter.phase(Phase.PROFILE),
            self._lock(LockMode.EXCLUSIVE if untold else LockMode.SHARED),
        ):
            readings = self._readings(plan, untold=untold)
            _refuse_plan(outgrown(plan, readings))
        with self._reporter.phase(Phase.SIZE):
            ledger = sized_by(plan, self._budget(), context, readings)
            _refuse_plan(self._shortage(ledger, self._engine.kv_layout))
            self._reporter.ledger(ledger, final=False)
        return ledger

    def _readings(self, plan: Ledger, *, untold: bool) -> Readings:
        if untold:
            self._memory.begin_window()
        activations = measure.warm_up(self._engine, self._device)
        if not same_activations(plan, activations):
            # What it did for the first time only is no part of the plan: that was measured with a second run.
            activations = measure.activations(self._engine, self._device)
        weights = measure.resident(self._device)
        non_torch = self._memory.non_torch() if untold else self._memory.grown()
        if non_torch is None:
            raise RememberedPlanError("cannot boot by its remembered plan: the driver tells its memory no more")
        return Readings(weights, activations, non_torch)

    @contextmanager
    def _lock(self, mode: LockMode) -> Iterator[None]:
        reporter = self._reporter

        def waits(holders: tuple[Holder, ...]) -> None:
            reporter.lock_waits(mode, tuple(str(holder) for holder in holders))

        began_s = reporter.now()
        with self._locks.hold(mode, phase=reporter.current, timeout_s=self._run.lock_timeout_s, on_wait=waits):
            reporter.lock_taken(mode, reporter.now() - began_s)
            yield
            released_s = reporter.now()
        reporter.lock_released(mode, released_s)

    def _budget(self) -> Term:
        if self._run.budget_bytes is not None:
            return Term(
                self._run.budget_bytes, Source.AUTO_BUDGET if self._run.budget_is_auto else Source.CONFIG_BUDGET
            )
        assert self._run.utilization is not None
        return Term(int(self._run.utilization * self._device.total_bytes()), Source.CONFIG_UTILIZATION)

    def _create_context(self) -> Term:
        context = self._memory.create_context()
        identity = self._memory.identity
        self._on_identity(None if identity is None else identity.pid)
        return context

    def _load(self) -> None:
        with self._lock(LockMode.SHARED):
            self._engine.allocate_weights(self._device)
            # Gives back what building the model has left: from here to the profile the stage changes no device memory.
            measure.settle(self._device)
        self._engine.read_weights(lambda done, total: self._reporter.progress(done, total, "bytes"))
        self._device.synchronize()

    def _profile(self) -> tuple[Term, Term, Term, Term]:
        """Weights, activation peak, non-torch growth and the graph estimate."""
        told = self._memory.identity is not None
        if told:
            # Compiling and tuning may take minutes, and nothing is measured: neighbours need not stand still for it.
            with self._lock(LockMode.SHARED):
                measure.warm_up(self._engine, self._device)
        with self._lock(LockMode.EXCLUSIVE):
            if not told:
                # What the first batch takes shows only as a change of the whole device, so nobody else may change it.
                self._memory.begin_window()
                measure.warm_up(self._engine, self._device)
            return self._measure()

    def _measure(self) -> tuple[Term, Term, Term, Term]:
        """What the warm stage takes. Runs under the exclusive lock."""
        activations = measure.activations(self._engine, self._device)
        trials = measure.trial_captures(self._engine, self._run.spec.capture_sizes, self._capture_one)
        # Not right after loading: what the first batch left in the allocator for good (workspaces) stays as well.
        weights = measure.resident(self._device)
        return weights, activations, self._memory.non_torch(), self._graphs(trials)

    def _graphs(self, trials: list[int]) -> Term:
        """The estimate, and what an earlier boot of this very stage has taught about it."""
        sizes = self._run.spec.capture_sizes
        if not sizes:
            return Term(0, Source.NONE)
        estimate, correction = estimate_graphs(trials, len(sizes)), self._run.graphs_correction_bytes
        return Term(estimate + correction, Source.CORRECTED if correction else Source.ESTIMATE)

    def _capture_one(self, size: int) -> int:
        """Capture one size; the bytes it took, by the driver's figure of this process or else by the allocator's."""
        held_before, reserved_before = self._memory.held_bytes(), self._device.memory().reserved_bytes
        with measure.collector_off():
            self._engine.capture(size)
        measure.settle(self._device)
        held_after, reserved_after = self._memory.held_bytes(), self._device.memory().reserved_bytes
        if held_before is None or held_after is None:
            return reserved_after - reserved_before
        return held_after - held_before

    def _shortage(self, ledger: Ledger, layout: KVLayout | None) -> str | None:
        return shortage(ledger, layout, self._run.spec.max_model_len, self._device.total_bytes())

    def _check_size(self, ledger: Ledger, layout: KVLayout | None) -> None:
        short = self._shortage(ledger, layout)
        if short is not None:
            raise BudgetTooSmallError(f"cannot size the KV cache: {short}")

    def _allocate(self, ledger: Ledger) -> Term:
        if ledger.num_blocks == 0:
            return ledger.kv
        free = self._device.free_bytes()
        if free < ledger.kv.size_bytes:
            raise StageError(
                f"cannot allocate {ledger.num_blocks} KV blocks: they take {format_size(ledger.kv.size_bytes)} and "
                f"device {self._run.device_index} has {format_size(free)} free; another process holds memory this "
                f"stage's budget counts on: stop it, or lower the budget"
            )
        reserved = self._device.memory().reserved_bytes
        self._engine.allocate_kv(ledger.num_blocks)
        return replace(ledger.kv, other_bytes=self._device.memory().reserved_bytes - reserved)

    def _capture(self, expected_bytes: int) -> Term:
        sizes = self._run.spec.capture_sizes
        if not sizes:
            return Term(0, Source.NONE)
        took: list[int] = []
        reserved = self._device.memory().reserved_bytes
        for done, size in enumerate(sizes):
            self._reporter.progress(done, len(sizes), "graphs")
            try:
                # Lock by lock: whoever waits to measure waits for one graph, not for all of them.
                with self._lock(LockMode.SHARED):
                    took.append(self._capture_one(size))
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(size, took, expected_bytes) from error
        self._reporter.progress(len(sizes), len(sizes), "graphs")
        return Term(max(sum(took), 0), Source.MEASURED, self._device.memory().reserved_bytes - reserved)

    def _out_of_memory(self, size: int, took: list[int], expected_bytes: int) -> BudgetOvershootError:
        """The error for a capture that found no room. What it would have taken is not known: as much as the largest."""
        would_take = sum(took) + max(took, default=expected_bytes)
        return BudgetOvershootError(
            f"cannot capture batch size {size}: the device is out of memory; its graphs took "
            f"{format_size(sum(took))} so far and were expected to take {format_size(expected_bytes)} in all; raise "
            f"the budget or the reserve, or capture fewer graphs",
            0 if self._engine.kv_layout is None else max(would_take - expected_bytes, VERIFY_BYTES),
        )

    def _check_budget(self, ledger: Ledger) -> None:
        over = ledger.overshoot_bytes
        if over:
            held = "" if ledger.held_bytes is None else f"; the driver says it holds {format_size(ledger.held_bytes)}"
            raise BudgetOvershootError(
                f"cannot keep the stage within its budget: with its graphs captured it takes {format_size(over)} more "
                f"than it was given ({figures(ledger)}; graphs were expected to take "
                f"{format_size(ledger.graphs_estimate_bytes)}{held}); raise the budget by that much or capture fewer "
                f"graphs",
                over if ledger.block_bytes else 0,
            )


def _refuse_plan(why: str | None) -> None:
    if why is not None:
        raise RememberedPlanError(f"cannot boot by its remembered plan: {why}; it is forgotten, and measured anew")
