"""What a boot ended with, for the next boot of the same plan: what it rests on, when it can be used, whether it held.

Pure rules over ledgers. The file is kept by ``supervisor.remembered``; ``worker.boot`` boots by it. A remembered ledger
is what an earlier boot ended with, graphs measured: its terms and its graph estimate give the same KV blocks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stagelaunch.core.ledger import KVLayout, Ledger, Source, Term, margin_bytes, whole_blocks
from stagelaunch.core.phases import Phase
from stagelaunch.core.units import MIB, format_size

TOLERANCE_BYTES = 32 * MIB
"""How far a reading of now may be from the remembered one. What can be off upwards (context; activations; weights,
non-torch and graphs, which are compared as one) stays within the smallest margin even together."""
BY_PLAN = (Phase.PROFILE, Phase.SIZE, Phase.ALLOCATE, Phase.CAPTURE)
"""The phases in which a remembered plan can be what is wrong."""
_SIZE_MAX = 2**53


@dataclass(frozen=True)
class Remembered:
    """What is known about one stage, and the plan it was learnt from."""

    grounds: Mapping[str, str]
    """Everything that could change it, by name: other grounds, another plan."""
    correction_bytes: int = 0
    """What a capture took beyond its estimate, and 5 % more."""
    ledger: Ledger | None = None
    """How a boot ended; None when none did, or when it did not hold."""


@dataclass(frozen=True)
class Readings:
    """What a boot by a plan can still read of its own, where the plan was measured."""

    weights: Term
    activations: Term
    non_torch: Term


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the grounds that are not what they were."""
    return tuple(sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name)))


def flaw(entry: Remembered) -> str | None:
    """Why no boot can have left this; None for what one can. Its text follows "it"."""
    ledger = entry.ledger
    if not 0 <= entry.correction_bytes < _SIZE_MAX:
        return f"has a correction of {entry.correction_bytes} bytes"
    if ledger is None:
        return None
    sizes = [size for _, term in ledger.rows() for size in (term.size_bytes, term.low_bytes, term.high_bytes)]
    sizes += [ledger.num_blocks, ledger.block_bytes, ledger.graphs_estimate_bytes, ledger.held_bytes or 0]
    if not all(0 <= size < _SIZE_MAX for size in sizes):
        return "has a size that cannot be"
    if ledger.overshoot_bytes:
        return "is over its budget"
    if ledger.margin.size_bytes != margin_bytes(ledger.budget.size_bytes):
        return f"has a margin of {format_size(ledger.margin.size_bytes)}"
    if ledger.num_blocks != (blocks := _blocks(ledger)):
        return f"has {ledger.num_blocks} KV blocks where its terms give {blocks}"
    if ledger.kv.size_bytes != blocks * ledger.block_bytes:
        return f"has {blocks} KV blocks in {format_size(ledger.kv.size_bytes)}"
    return None


def _blocks(plan: Ledger) -> int:
    """The KV blocks that its terms gave, with the graph estimate they were sized by."""
    terms = (plan.context, plan.weights, plan.activations, plan.non_torch, plan.margin)
    spent_bytes = sum(term.size_bytes for term in terms) + plan.graphs_estimate_bytes
    return whole_blocks(plan.budget.size_bytes - spent_bytes, plan.block_bytes)


def unusable(
    plan: Ledger, budget_bytes: int, layout: KVLayout | None, context_bytes: int, free_bytes: int, reserved_bytes: int
) -> str | None:
    """Why a stage that has loaded its weights must measure after all; None when it need not.

    ``free_bytes`` of the device, of which it will take what it does not have yet; it has ``reserved_bytes``.
    """
    block_bytes = 0 if layout is None else layout.block_bytes
    missing_bytes = plan.used_bytes - plan.context.size_bytes - reserved_bytes
    if budget_bytes != plan.budget.size_bytes:
        return f"the budget is {format_size(budget_bytes)}, and was {format_size(plan.budget.size_bytes)}"
    if block_bytes != plan.block_bytes:
        return f"a KV block takes {block_bytes} bytes, and took {plan.block_bytes}"
    if abs(context_bytes - plan.context.size_bytes) > TOLERANCE_BYTES:
        return _differs("the context takes", context_bytes, plan.context.size_bytes)
    if free_bytes < missing_bytes:
        return f"it will take {format_size(missing_bytes)} more, and {format_size(free_bytes)} is free now"
    return None


def sized_by(plan: Ledger, budget: Term, context: Term, readings: Readings) -> Ledger:
    """The ledger that a plan gives before capture: its terms, beside them what is read now; the same KV blocks."""
    return replace(
        plan,
        budget=budget,
        context=_recalled(plan.context, context),
        weights=_recalled(plan.weights, readings.weights),
        activations=_recalled(plan.activations, readings.activations),
        non_torch=_recalled(plan.non_torch, readings.non_torch),
        graphs=replace(_recalled(plan.graphs, None), size_bytes=plan.graphs_estimate_bytes),
        kv=Term(plan.num_blocks * plan.block_bytes, plan.kv.source),
        held_bytes=None,
    )


def _recalled(term: Term, now: Term | None) -> Term:
    source = Source.NONE if term.source is Source.NONE else Source.REMEMBERED
    return Term(term.size_bytes, source, None if now is None else now.size_bytes)


def outgrown(plan: Ledger, readings: Readings) -> str | None:
    """Why the plan does not hold, as far as can be told before its KV cache is allocated; None when it may.

    Weights and non-torch may be less than remembered until the first capture: what that leaves for good counts for
    whoever made it, which was a trial capture when the plan was measured.
    """
    for what, now, then in (
        ("the weights take", readings.weights, plan.weights),
        ("libraries take", readings.non_torch, plan.non_torch),
    ):
        if now.size_bytes > then.size_bytes + TOLERANCE_BYTES:
            return _differs(what, now.size_bytes, then.size_bytes)
    if not same_activations(plan, readings.activations):
        return _differs("the largest batch takes", readings.activations.size_bytes, plan.activations.size_bytes)
    return None


def same_activations(plan: Ledger, now: Term) -> bool:
    """Whether the largest batch takes what it took."""
    return abs(now.size_bytes - plan.activations.size_bytes) <= TOLERANCE_BYTES


def broken(plan: Ledger, ended: Ledger) -> str | None:
    """Why the plan did not hold, with all graphs captured; None when it did. ``ended`` comes from ``sized_by``."""
    kept_bytes = sum(term.size_bytes for term in (plan.weights, plan.non_torch, plan.graphs))
    now_bytes = _read(ended.weights) + _read(ended.non_torch) + ended.graphs.size_bytes
    if abs(now_bytes - kept_bytes) > TOLERANCE_BYTES:
        return _differs("weights, libraries and graphs take", now_bytes, kept_bytes)
    if plan.held_bytes is None or ended.held_bytes is None:
        return None
    # Twice: the context is in it, and may differ by itself.
    if abs(ended.held_bytes - plan.held_bytes) > 2 * TOLERANCE_BYTES:
        return _differs("the driver says the process holds", ended.held_bytes, plan.held_bytes)
    return None


def _read(term: Term) -> int:
    """What was read now of a remembered term."""
    return term.size_bytes if term.other_bytes is None else term.other_bytes


def _differs(what: str, now_bytes: int, then_bytes: int) -> str:
    return f"{what} {format_size(now_bytes)}, and it was {format_size(then_bytes)}"


def measured(ended: Ledger) -> bool:
    """Whether a boot ended with its own measurements, worth keeping: not by an earlier one's."""
    return Source.REMEMBERED not in (term.source for _, term in ended.rows())
