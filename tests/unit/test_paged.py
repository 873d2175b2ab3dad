"""The paged cache in plain torch: attention over any blocks is sdpa over the same tokens; blocks are really owned."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stagelaunch.core.errors import StageError  # noqa: E402
from stagelaunch.core.ledger import KVLayout  # noqa: E402
from stagelaunch.engines.paged import (  # noqa: E402
    NULL_BLOCK,
    BlockAllocator,
    BlockTable,
    CausalPrefill,
    PagedDecode,
    PagedKVCache,
    chunk_blocks_for,
    paged_attention,
)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype_bytes=4, block_size=4)
NUM_BLOCKS = 24


class HostMemory:
    """What the cache needs of a device: memory nobody has written to yet, which here is NaN."""

    torch_device = torch.device("cpu")
    compute = nullcontext

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return torch.full(shape, torch.nan, dtype=dtype)


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def new_cache(num_blocks: int = NUM_BLOCKS, layout: KVLayout = LAYOUT) -> PagedKVCache:
    return PagedKVCache(layout, num_blocks, torch.float32, HostMemory())  # type: ignore[arg-type]


def random_tables(lengths: list[int]) -> list[BlockTable]:
    """Blocks in no order, none shared, the null block not among them."""
    free = (torch.randperm(NUM_BLOCKS - 1) + 1).tolist()
    return [BlockTable(tuple(free.pop() for _ in range(math.ceil(n / 4))), 4) for n in lengths]


def sdpa(query: Any, keys: Any, values: Any, scale: float) -> Any:
    """[heads, dim] over [tokens, kv_heads, dim], through torch's own attention."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        query[None, :, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], scale=scale, enable_gqa=True
    )
    return attended[0, :, 0]


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3, 5, 6, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (3, 1)])
def test_paged_attention_is_sdpa_over_the_same_tokens(chunk_blocks: int, heads: int, kv_heads: int) -> None:
    lengths = [1, 4, 5, 13, 22]
    tables = random_tables(lengths)
    keys, values = torch.randn(2, NUM_BLOCKS, 4, kv_heads, 8)
    query = torch.randn(len(lengths), heads, 8) * 3
    columns = torch.tensor([table.row(6) for table in tables])
    attended = paged_attention(query, keys, values, columns, torch.tensor(lengths), 0.3, chunk_blocks)
    for row, (table, length) in enumerate(zip(tables, lengths)):
        slots = torch.tensor(table.slots(0, length))
        expected = sdpa(query[row], keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots], 0.3)
        torch.testing.assert_close(attended[row], expected, atol=2e-6, rtol=0)


def test_what_lies_past_the_context_is_never_used() -> None:
    """NaN in the null block, in the rest of the last block and in blocks beyond the context changes nothing."""
    keys, values = torch.randn(2, NUM_BLOCKS, 4, 2, 8)
    keys[NULL_BLOCK] = values[NULL_BLOCK] = torch.nan
    keys[7, 2:] = values[7, 2:] = torch.nan
    keys[9] = values[9] = torch.nan
    columns = torch.tensor([[3, 7, 9, NULL_BLOCK]])
    attended = paged_attention(torch.randn(1, 4, 8), keys, values, columns, torch.tensor([6]), 0.3, 2)
    assert attended.isfinite().all()


def test_attention_keeps_the_query_dtype_and_computes_in_float32() -> None:
    keys, values = torch.randn(2, NUM_BLOCKS, 4, 2, 8)
    query, columns, lengths = torch.randn(1, 4, 8), torch.tensor([[5, 2, 8]]), torch.tensor([11])
    low = [tensor.bfloat16() for tensor in (query, keys, values)]
    attended = paged_attention(*low, columns, lengths, 0.3, 1)
    assert attended.dtype == torch.bfloat16
    expected = paged_attention(*(tensor.float() for tensor in low), columns, lengths, 0.3, 1)
    assert torch.equal(attended, expected.bfloat16())


def test_tokens_decoded_one_by_one_attend_as_the_whole_sequence_does() -> None:
    """Prefill of a few tokens, then decode of the rest, through blocks in no order: equal to one causal pass."""
    cache, tokens, prompt = new_cache(), 19, 6
    query, key, value = (torch.randn(1, heads, tokens, 8) for heads in (4, 2, 2))
    whole = CausalPrefill().attend(1, query, key, value, 0.3)
    table = random_tables([tokens])[0]
    prefill = CausalPrefill(cache, torch.tensor(table.slots(0, prompt)))
    parts = [prefill.attend(1, query[:, :, :prompt], key[:, :, :prompt], value[:, :, :prompt], 0.3)]
    for token in range(prompt, tokens):
        now = slice(token, token + 1)
        state = PagedDecode(
            cache,
            torch.tensor(table.slots(token, token + 1)),
            torch.tensor([table.row(5)]),
            torch.tensor([token + 1]),
            chunk_blocks=2,
        )
        parts.append(state.attend(1, query[:, :, now], key[:, :, now], value[:, :, now], 0.3))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-6, rtol=0)
    untouched = set(range(NUM_BLOCKS)) - set(table.blocks)
    for blocks in cache.blocks(1):
        assert blocks[sorted(untouched)].isnan().all(), "a block of nobody was written, perhaps the null block"
    for blocks in cache.blocks(0):
        assert blocks.isnan().all(), "another layer was written"


def test_the_cache_is_exactly_its_blocks() -> None:
    """num_blocks x block_bytes, or the ledger's promise is worth nothing."""
    keys, values = new_cache().blocks(0)
    assert keys.shape == values.shape == (NUM_BLOCKS, 4, 2, 8)
    assert keys.untyped_storage().nbytes() == NUM_BLOCKS * LAYOUT.block_bytes
    assert values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()


def test_chunks_fit_their_bound_and_make_progress() -> None:
    column_bytes = 3 * 4 * 2 * 8 * 4
    assert chunk_blocks_for(LAYOUT, batch=3, columns=10, limit_bytes=4 * column_bytes + 1) == 4
    assert chunk_blocks_for(LAYOUT, batch=3, columns=10, limit_bytes=1) == 1
    assert chunk_blocks_for(LAYOUT, batch=3, columns=10) == 10


def test_the_allocator_hands_out_every_block_but_the_null_block_once() -> None:
    allocator = BlockAllocator(6, block_size=4)
    tables = [allocator.allocate(4), allocator.allocate(5), allocator.allocate(8)]
    handed_out = [block for table in tables for block in table.blocks]
    assert sorted(handed_out) == [1, 2, 3, 4, 5]
    assert allocator.num_free == 0
    with pytest.raises(StageError, match="cannot allocate 1 KV blocks for a sequence of 1 tokens: 0 of 5 are free"):
        allocator.allocate(1)
    allocator.free(tables[1])
    assert set(allocator.allocate(8).blocks) == set(tables[1].blocks)


def test_an_allocation_that_fails_takes_nothing() -> None:
    allocator = BlockAllocator(4, block_size=4)
    with pytest.raises(StageError, match="cannot allocate 4 KV blocks"):
        allocator.allocate(13)
    assert len(allocator.allocate(12).blocks) == 3


def test_blocks_are_freed_once() -> None:
    """Freed twice, a block would be handed to two sequences."""
    allocator = BlockAllocator(4, block_size=4)
    table = allocator.allocate(4)
    allocator.free(table)
    with pytest.raises(StageError, match="cannot free KV blocks"):
        allocator.free(table)
    with pytest.raises(StageError, match="cannot free KV blocks"):
        allocator.free(BlockTable((NULL_BLOCK,), 4))


def test_slots_follow_the_blocks() -> None:
    table = BlockTable((5, 2), 4)
    assert table.slots(0, 8) == [20, 21, 22, 23, 8, 9, 10, 11]
    assert table.slots(5, 6) == [9]
    assert table.row(4) == [5, 2, NULL_BLOCK, NULL_BLOCK]
    with pytest.raises(StageError, match="cannot place a sequence of 2 blocks in a table of 1"):
        table.row(1)


@pytest.mark.parametrize(("num_blocks", "dtype"), [(1, torch.float32), (8, torch.bfloat16)])
def test_a_cache_that_is_not_its_layout_is_refused(num_blocks: int, dtype: Any) -> None:
    with pytest.raises(StageError, match="cannot allocate a KV cache"):
        PagedKVCache(LAYOUT, num_blocks, dtype, HostMemory())  # type: ignore[arg-type]
