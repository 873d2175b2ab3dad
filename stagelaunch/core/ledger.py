"""The memory ledger of one stage: where every byte of its budget goes, and what is left for KV cache.

    KV = round_down(B - C - W - A - N - G - margin, whole blocks)

Every term is local to the stage's own process, so the result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from stagelaunch.core.units import MIB, format_size

_MARGIN_BYTES, _MARGIN_SHARE = 150 * MIB, 200


class Source(StrEnum):
    """How a term of the ledger became known."""

    CONFIG_UTILIZATION = "utilization x device total"
    CONFIG_BUDGET = "absolute budget"
    AUTO_BUDGET = "automatic budget"
    CONFIG = "config"
    OWN_PID = "driver's figure of this pid"
    HOST_PID = "driver's figure of this process's pid outside the container"
    NEW_PID = "driver's figure of the pid that appeared with the context"
    FREE_DELTA = "free-memory change inside one exclusive window"
    ALLOCATOR = "allocator reserved bytes"
    PROFILE = "peak of the largest batch"
    ESTIMATE = "estimated from trial captures"
    CORRECTED = "estimated, and corrected by what an earlier capture took"
    MEASURED = "measured"
    REMEMBERED = "remembered from an earlier boot"
    FORECAST = "forecast from the checkpoint"
    ASSUMED = "assumed"
    RULE = "rule"
    NONE = "not used by this stage"


@dataclass(frozen=True)
class Term:
    """One quantity of the ledger, in bytes, and how it became known."""

    size_bytes: int
    source: Source
    other_bytes: int | None = None
    """A second reading of the same quantity, where there is one: by other means, or of its lower or upper bound."""

    @property
    def low_bytes(self) -> int:
        """The smaller reading."""
        return self.size_bytes if self.other_bytes is None else min(self.size_bytes, self.other_bytes)

    @property
    def high_bytes(self) -> int:
        """The larger reading."""
        return self.size_bytes if self.other_bytes is None else max(self.size_bytes, self.other_bytes)


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
    graphs_estimate_bytes: int
    """What the graphs were expected to take when the KV cache was sized."""
    held_bytes: int | None = None
    """What the driver says the process holds with everything in place; None before that, or where it does not say."""

    @property
    def overshoot_bytes(self) -> int:
        """How far the stage exceeds its budget, by its terms or by the driver's figure; 0 when it does not."""
        return max(self.used_bytes, self.held_bytes or 0, self.budget.size_bytes) - self.budget.size_bytes

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
    return max(_MARGIN_BYTES, budget_bytes // _MARGIN_SHARE)


def smallest_budget(needed_bytes: int) -> int:
    """The smallest budget that leaves ``needed_bytes`` beside its margin."""
    small = needed_bytes + _MARGIN_BYTES
    if margin_bytes(small) == _MARGIN_BYTES:
        return small
    budget = needed_bytes * _MARGIN_SHARE // (_MARGIN_SHARE - 1)
    while budget - margin_bytes(budget) < needed_bytes:
        budget += 1
    return budget


def correction_bytes(overshoot_bytes: int) -> int:
    """By how much to cut the KV cache of a stage whose graphs took more than estimated: 5 % more than it was over."""
    return -(-overshoot_bytes * 21 // 20)


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


def fill_ledger(
    *,
    budget: Term,
    context: Term,
    weights: Term,
    activations: Term,
    non_torch: Term,
    graphs: Term,
    layout: KVLayout | None,
) -> Ledger:
    """The ledger with its KV term: as many whole blocks as the budget leaves, enough or not."""
    margin = Term(margin_bytes(budget.size_bytes), Source.RULE)
    spent = sum(t.size_bytes for t in (context, weights, activations, non_torch, graphs, margin))
    block_bytes = 0 if layout is None else layout.block_bytes
    num_blocks = whole_blocks(budget.size_bytes - spent, block_bytes)
    kv = Term(num_blocks * block_bytes, Source.NONE if layout is None else Source.RULE)
    return Ledger(
        budget, context, weights, activations, non_torch, graphs, margin, kv, num_blocks, block_bytes, graphs.size_bytes
    )


def whole_blocks(left_bytes: int, block_bytes: int) -> int:
    """How many KV blocks fit in what a budget leaves; 0 for a stage without KV cache."""
    return max(left_bytes, 0) // block_bytes if block_bytes else 0


def shortage(ledger: Ledger, layout: KVLayout | None, max_model_len: int, total_bytes: int) -> str | None:
    """Why the budget is too small, and what would do; None for one that is not.

    The terms must fit, and beside them one request of ``max_model_len`` tokens and the null block. ``total_bytes`` is
    the device's, to give the smallest budget as a utilization as well.
    """
    needed = 0 if layout is None else layout.blocks_for(max_model_len) * layout.block_bytes
    short_bytes = needed - ledger.kv.size_bytes - ledger.unspent_bytes
    if short_bytes <= 0:
        return None
    spent = ledger.used_bytes - ledger.kv.size_bytes
    return _too_small(ledger, spent + needed, layout, max_model_len, total_bytes)


def figures(ledger: Ledger) -> str:
    """Every term in one line: ``budget 1.00 GiB, context 64.00 MiB, ...``."""
    return ", ".join(f"{name} {format_size(term.size_bytes)}" for name, term in ledger.rows())


def _too_small(ledger: Ledger, needed_bytes: int, layout: KVLayout | None, max_model_len: int, total_bytes: int) -> str:
    wanted = "" if layout is None else f" and {_request(layout, max_model_len)}"
    return (
        f"the stage does not fit its budget ({figures(ledger)}): everything but the KV cache{wanted} must fit; "
        f"{_budget_advice(smallest_budget(needed_bytes), total_bytes)}{_length_advice(ledger, layout)}"
    )


def _request(layout: KVLayout, max_model_len: int) -> str:
    blocks = layout.blocks_for(max_model_len)
    return (
        f"{format_size(blocks * layout.block_bytes)} of it for one request of {max_model_len} tokens ({blocks} blocks)"
    )


def _budget_advice(smallest_bytes: int, total_bytes: int) -> str:
    advice = f"give it a budget of at least {smallest_bytes} bytes ({format_size(smallest_bytes)}"
    if smallest_bytes > total_bytes:
        return f"{advice}, more than the device has)"
    return f"{advice}, utilization {smallest_utilization(smallest_bytes, total_bytes)})"


def smallest_utilization(budget_bytes: int, total_bytes: int) -> float:
    """The smallest share of the total, in steps of 0.0001, that gives at least this budget."""
    steps = budget_bytes * 10_000 // total_bytes
    while int(steps / 10_000 * total_bytes) < budget_bytes:
        steps += 1
    return steps / 10_000


def _length_advice(ledger: Ledger, layout: KVLayout | None) -> str:
    if layout is None:
        return ""
    longest = (ledger.num_blocks - 1) * layout.block_size
    return f", or a max_model_len of at most {longest}" if longest > 0 else ""


def ledger_to_json(ledger: Ledger) -> dict[str, Any]:
    """A ledger as users get it: its terms by name, each with both readings and its source."""
    terms = {
        name: {
            "bytes": term.size_bytes,
            "low_bytes": term.low_bytes,
            "high_bytes": term.high_bytes,
            "source": term.source,
        }
        for name, term in ledger.rows()
    }
    return {
        "terms": terms,
        "num_blocks": ledger.num_blocks,
        "block_bytes": ledger.block_bytes,
        "unspent_bytes": ledger.unspent_bytes,
        "graphs_estimate_bytes": ledger.graphs_estimate_bytes,
        "held_bytes": ledger.held_bytes,
    }
