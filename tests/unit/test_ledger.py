"""The arithmetic of a stage's memory."""

from __future__ import annotations

import pytest

from stagelaunch.core.errors import BudgetTooSmallError
from stagelaunch.core.ledger import KVLayout, Ledger, Source, Term, close_ledger, estimate_graphs, margin_bytes
from stagelaunch.core.units import GIB, MIB

THINKER = KVLayout(num_layers=48, num_kv_heads=4, head_dim=128, dtype_bytes=2, block_size=16)
TALKER = KVLayout(num_layers=20, num_kv_heads=2, head_dim=128, dtype_bytes=2, block_size=16)


def ledger(budget: int, *, weights: int = 0, layout: KVLayout | None = THINKER, max_model_len: int = 16) -> Ledger:
    def term(size: int) -> Term:
        return Term(size, Source.MEASURED)

    return close_ledger(
        budget=term(budget), context=term(0), weights=term(weights), activations=term(0), non_torch=term(0),
        graphs=term(0), layout=layout, max_model_len=max_model_len,
    )  # fmt: skip


def test_kv_bytes_per_token_of_the_reference_model() -> None:
    assert (THINKER.bytes_per_token, TALKER.bytes_per_token) == (98_304, 20_480)


def test_reference_number_of_blocks() -> None:
    # DESIGN's worked example leaves the margin out: 12.18 GiB less 4.0 GiB in blocks of 1.5 MiB.
    left = 71.26 * GIB - 59.08 * GIB - 4.0 * GIB
    assert int(left) // THINKER.block_bytes == pytest.approx(5584, abs=2)


def test_terms_and_kv_fill_the_budget_to_less_than_a_block() -> None:
    made = ledger(10 * GIB, weights=3 * GIB)
    assert 0 <= made.unspent_bytes < THINKER.block_bytes
    total = sum(term.size_bytes for name, term in made.rows() if name != "budget")
    assert total + made.unspent_bytes == made.budget.size_bytes


def test_one_request_and_the_null_block_must_fit_exactly() -> None:
    budget = 150 * MIB + 2 * THINKER.block_bytes
    assert ledger(budget).num_blocks == 2
    with pytest.raises(BudgetTooSmallError) as caught:
        ledger(budget - 1)
    assert f"at least {budget} bytes" in str(caught.value)


def test_a_longer_request_needs_more() -> None:
    budget = 150 * MIB + 2 * THINKER.block_bytes
    with pytest.raises(BudgetTooSmallError, match="one request of 17 tokens"):
        ledger(budget, max_model_len=17)


def test_a_stage_without_kv_needs_only_its_terms() -> None:
    made = ledger(150 * MIB, layout=None)
    assert (made.num_blocks, made.kv.size_bytes, made.unspent_bytes) == (0, 0, 0)
    with pytest.raises(BudgetTooSmallError, match="needs no KV cache"):
        ledger(150 * MIB, weights=1, layout=None)


def test_margin_is_the_larger_of_both_rules() -> None:
    assert margin_bytes(1 * GIB) == 150 * MIB
    assert margin_bytes(100 * GIB) == GIB // 2


@pytest.mark.parametrize(
    ("trials", "num_sizes", "estimate"),
    [
        ([], 0, 0),
        ([100], 1, 100),
        ([100], 3, 300),
        ([100, 20, 10], 3, 130),
        ([100, 20, 10], 5, 160),
        # A marginal below zero is noise: the remaining sizes take nothing, and are never a gift.
        ([100, -20, -10], 5, 70),
        ([-5, -5, -5], 3, 0),
    ],
)
def test_graph_estimate(trials: list[int], num_sizes: int, estimate: int) -> None:
    assert estimate_graphs(trials, num_sizes) == estimate
