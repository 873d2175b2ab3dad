"""The arithmetic of a stage's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagelaunch.core.ledger import (
    KVLayout,
    Ledger,
    Source,
    Term,
    correction_bytes,
    estimate_graphs,
    fill_ledger,
    margin_bytes,
    shortage,
    smallest_budget,
    smallest_utilization,
)
from stagelaunch.core.units import GIB, MIB

THINKER = KVLayout(num_layers=48, num_kv_heads=4, head_dim=128, dtype_bytes=2, block_size=16)
TALKER = KVLayout(num_layers=20, num_kv_heads=2, head_dim=128, dtype_bytes=2, block_size=16)


class TooSmallError(Exception):
    """The budget does not do; its text is the advice."""


def ledger(
    budget: int, *, weights: int = 0, layout: KVLayout | None = THINKER, max_model_len: int = 16, total: int = 80 * GIB
) -> Ledger:
    def term(size: int) -> Term:
        return Term(size, Source.MEASURED)

    made = fill_ledger(
        budget=term(budget), context=term(0), weights=term(weights), activations=term(0), non_torch=term(0),
        graphs=term(0), layout=layout,
    )  # fmt: skip
    short = shortage(made, layout, max_model_len, total)
    if short is not None:
        raise TooSmallError(short)
    return made


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
    with pytest.raises(TooSmallError) as caught:
        ledger(budget - 1)
    assert f"at least {budget} bytes" in str(caught.value)


def test_a_longer_request_needs_more() -> None:
    budget = 150 * MIB + 2 * THINKER.block_bytes
    with pytest.raises(TooSmallError, match=r"one request of 17 tokens \(3 blocks\)"):
        ledger(budget, max_model_len=17)


def test_a_stage_without_kv_needs_only_its_terms() -> None:
    made = ledger(150 * MIB, layout=None)
    assert (made.num_blocks, made.kv.size_bytes, made.unspent_bytes) == (0, 0, 0)
    with pytest.raises(TooSmallError, match="everything but the KV cache must fit; give"):
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


def test_what_would_do_is_said_exactly() -> None:
    # 40 GiB of weights, 3 blocks needed, 2 fit: the budget's own margin (0.5 %) grows with it.
    total, weights, wanted = 80 * GIB, 40 * GIB, 3 * THINKER.block_bytes
    enough = smallest_budget(weights + wanted)
    made = ledger(enough, weights=weights, max_model_len=32, total=total)
    assert made.num_blocks == 3
    with pytest.raises(TooSmallError) as caught:
        ledger(enough - 1, weights=weights, max_model_len=32, total=total)
    said = str(caught.value)
    share = smallest_utilization(enough, total)
    assert (
        f"at least {enough} bytes ({enough / GIB:.2f} GiB, utilization {share}), or a max_model_len of at most 16"
        in said
    )
    assert "weights 40.00 GiB" in said
    assert int(share * total) >= enough > int((share - 0.0001) * total)
    assert ledger(enough - 1, weights=weights, max_model_len=16, total=total).num_blocks == 2


def test_a_budget_no_device_has_is_not_given_as_a_share() -> None:
    with pytest.raises(TooSmallError, match="more than the device has") as caught:
        ledger(GIB, weights=2 * GIB, total=GIB)
    assert "utilization" not in str(caught.value)
    assert "max_model_len of" not in str(caught.value)


@pytest.mark.parametrize("needed", [0, 1, 150 * MIB, 29_850 * MIB - 1, 29_850 * MIB, 29_850 * MIB + 1, 70 * GIB + 7])
def test_the_smallest_budget_is_the_smallest(needed: int) -> None:
    budget = smallest_budget(needed)
    assert budget - margin_bytes(budget) >= needed
    assert budget - 1 - margin_bytes(budget - 1) < needed


def test_a_correction_is_five_percent_more_than_the_overshoot() -> None:
    assert [correction_bytes(size) for size in (0, 1, 20, 21, 100 * MIB)] == [0, 2, 21, 23, 105 * MIB]


@pytest.mark.parametrize(
    ("graphs", "held", "over"),
    [
        (0, None, 0),
        (150 * MIB, None, 0),
        (151 * MIB, None, MIB),
        (0, GIB, 0),
        (0, GIB + 5, 5),
        (151 * MIB, GIB + 5, MIB),
    ],
)
def test_overshoot_is_by_the_terms_or_by_the_drivers_figure(graphs: int, held: int | None, over: int) -> None:
    made = ledger(GIB, layout=None, weights=GIB - 150 * MIB)
    made = replace(made, graphs=Term(graphs, Source.MEASURED), held_bytes=held)
    assert made.overshoot_bytes == over


def test_a_term_has_its_lower_and_upper_reading() -> None:
    assert (Term(5, Source.RULE).low_bytes, Term(5, Source.RULE).high_bytes) == (5, 5)
    assert (Term(5, Source.RULE, 7).low_bytes, Term(5, Source.RULE, 3).low_bytes) == (5, 3)
    assert (Term(5, Source.RULE, 7).high_bytes, Term(5, Source.RULE, 3).high_bytes) == (7, 5)
