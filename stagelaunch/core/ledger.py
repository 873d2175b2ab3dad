"""The memory ledger of one stage: where every byte of its budget goes, and what is left for KV cache.

    KV = round_down(B - C - W - A - N - G - margin, whole blocks)

Every term is local to the stage's own process, so the result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from stagelaunch.core.errors import BudgetTooSmallError
from stagelaunch.core.units import MIB, format_size


class Source(StrEnum):
    """How a term of the ledger became known."""

    CONFIG_UTILIZATION = "utilization x device total"
    CONFIG_BUDGET = "absolute budget"
    OWN_FIGURE = "own figure of the device driver"
    FREE_DELTA = "free-memory change inside one exclusive window"
    ALLOCATOR = "allocator reserved bytes"
    PROFILE = "peak of the largest batch"
    ESTIMATE = "estimated from trial captures"
    MEASURED = "measured"
    RULE = "rule"
    NONE = "not used by this stage"


@dataclass(frozen=True)
class Term:
    """One quantity of the ledger, in bytes, and how it became known."""

    size_bytes: int
    source: Source


@dataclass(frozen=True)
class KVLayout:
    """Shape of a paged KV cache: what one block of ``block_size`` tokens costs on one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """K and V of one block over all layers."""
        return self.bytes_per_token * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks one sequence of ``num_tokens`` needs, and the null block no sequence may use."""
        return -(-num_tokens // self.block_size) + 1


@dataclass(frozen=True)
class Ledger:
    """A stage's budget and its terms. ``kv`` and ``num_blocks`` are 0 for a stage without KV cache."""

    budget: Term
    context: Term
    weights: Term
    activations: Term
    non_torch: Term
    graphs: Term
    margin: Term
    kv: Term
    num_blocks: int
    block_bytes: int

    @property
    def used_bytes(self) -> int:
        """Everything but what is left unspent: context, weights, activations, non-torch, graphs, KV."""
        terms = (self.context, self.weights, self.activations, self.non_torch, self.graphs, self.kv)
        return sum(term.size_bytes for term in terms)

    @property
    def unspent_bytes(self) -> int:
        """Budget less all terms and the margin: the remainder of rounding to whole blocks, or all of it without KV."""
        return self.budget.size_bytes - self.used_bytes - self.margin.size_bytes

    def rows(self) -> tuple[tuple[str, Term], ...]:
        """The terms with their names, in the order they are printed."""
        names = ("budget", "context", "weights", "activations", "non_torch", "graphs", "margin", "kv")
        return tuple((name, getattr(self, name)) for name in names)


def margin_bytes(budget_bytes: int) -> int:
    """What is kept free for fragmentation: 150 MiB or 0.5 % of the budget, whichever is more."""
    return max(150 * MIB, budget_bytes // 200)


def estimate_graphs(trial_bytes: Sequence[int], num_sizes: int) -> int:
    """Device memory of capturing ``num_sizes`` graphs, from the first few captured largest first.

    What was captured counts as measured; each remaining size as the median of the marginals after the first,
    never less than nothing. 0 for no graphs.
    """
    if num_sizes == 0 or not trial_bytes:
        return 0
    marginals = trial_bytes[1:]
    each = max(int(median(marginals)), 0) if marginals else max(trial_bytes[0], 0)
    return max(sum(trial_bytes) + each * (num_sizes - len(trial_bytes)), 0)


def close_ledger(
    *,
    budget: Term,
    context: Term,
    weights: Term,
    activations: Term,
    non_torch: Term,
    graphs: Term,
    layout: KVLayout | None,
    max_model_len: int,
) -> Ledger:
    """The ledger with its KV term: as many whole blocks as the budget leaves.

    Raises BudgetTooSmallError when the terms alone exceed the budget, or when what is left cannot hold one request of
    ``max_model_len`` tokens and the null block; the text says the smallest budget that would do.
    """
    margin = Term(margin_bytes(budget.size_bytes), Source.RULE)
    spent = sum(t.size_bytes for t in (context, weights, activations, non_torch, graphs, margin))
    left = budget.size_bytes - spent
    needed = 0 if layout is None else layout.blocks_for(max_model_len) * layout.block_bytes
    if left < needed:
        raise BudgetTooSmallError(_too_small(budget, spent, needed, max_model_len))
    num_blocks = 0 if layout is None else left // layout.block_bytes
    block_bytes = 0 if layout is None else layout.block_bytes
    kv = Term(num_blocks * block_bytes, Source.NONE if layout is None else Source.RULE)
    return Ledger(budget, context, weights, activations, non_torch, graphs, margin, kv, num_blocks, block_bytes)


def _too_small(budget: Term, spent_bytes: int, needed_bytes: int, max_model_len: int) -> str:
    smallest = spent_bytes + needed_bytes
    wanted = (
        f"{format_size(needed_bytes)} of KV cache for one request of {max_model_len} tokens"
        if needed_bytes
        else "no KV cache"
    )
    return (
        f"cannot size the stage in its budget of {format_size(budget.size_bytes)}: context, weights, activations, "
        f"graphs and margin take {format_size(spent_bytes)} and it needs {wanted}; "
        f"give it a budget of at least {smallest} bytes ({format_size(smallest)})"
    )
