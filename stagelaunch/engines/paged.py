"""The paged KV cache in plain torch: whole blocks, block tables, and attention that reads and writes through them.

Not a kernel and not a scheduler: correct on any device, bounded in memory, free of data-dependent control flow, so
that a decode step can be captured. Called by ``decode``; the block count is decided by the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stagelaunch.core.errors import StageError
from stagelaunch.core.ledger import KVLayout
from stagelaunch.devices.base import Device

NULL_BLOCK = 0
"""The block no sequence owns: padding rows of a batch write here and unused table columns point here."""

FORECAST_CHUNKS = 3
"""How many chunks decode attention runs where nothing has data: the first, and two that meet their predecessor's
leftovers. Every further one takes what the third takes."""

CHUNK_BYTES = 32 * 1024 * 1024
"""What decode attention gathers at once, in float32, for the keys of one chunk of block columns (values: as much)."""


@dataclass(frozen=True)
class BlockTable:
    """The blocks of one sequence, in token order."""

    blocks: tuple[int, ...]
    block_size: int

    def slots(self, start: int, stop: int) -> list[int]:
        """Where tokens ``start`` to ``stop - 1`` live: block x block_size + offset."""
        size = self.block_size
        return [self.blocks[token // size] * size + token % size for token in range(start, stop)]

    def row(self, width: int) -> list[int]:
        """The blocks as a table row of ``width`` columns, padded with the null block. StageError when they are more."""
        if len(self.blocks) > width:
            raise StageError(
                f"cannot place a sequence of {len(self.blocks)} blocks in a table of {width} columns: it is longer "
                "than max_model_len; send a shorter one, or raise max_model_len"
            )
        return [*self.blocks, *[NULL_BLOCK] * (width - len(self.blocks))]


class BlockAllocator:
    """Hands out the blocks of a cache of ``num_blocks``, whole blocks per sequence, never the null block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._capacity = num_blocks - 1
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._lent: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, num_tokens: int) -> BlockTable:
        """Blocks for a sequence of ``num_tokens``, all or none. StageError when there are not enough."""
        needed = -(-num_tokens // self.block_size)
        if needed > len(self._free):
            raise StageError(
                f"cannot allocate {needed} KV blocks for a sequence of {num_tokens} tokens: {len(self._free)} of "
                f"{self._capacity} are free; end other sequences first, or give the stage a larger budget"
            )
        blocks = tuple(self._free.pop() for _ in range(needed))
        self._lent.update(blocks)
        return BlockTable(blocks, self.block_size)

    def free(self, table: BlockTable) -> None:
        """Take back the blocks of a sequence. StageError when it does not hold them: they may be another's by now."""
        strangers = [block for block in table.blocks if block not in self._lent]
        if strangers:
            raise StageError(
                f"cannot free KV blocks {strangers}: no sequence holds them; free each sequence's table once"
            )
        self._lent.difference_update(table.blocks)
        self._free.extend(reversed(table.blocks))


class PagedKVCache:
    """Keys and values of ``num_blocks`` blocks for every layer, in one resident tensor of exactly their size."""

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: Device) -> None:
        if dtype.itemsize != layout.dtype_bytes or num_blocks < 2:
            raise StageError(
                f"cannot allocate a KV cache of {num_blocks} blocks of {dtype}: it takes the null block and one more, "
                f"of {layout.dtype_bytes} bytes per element; raise the budget, or make the dtype the layout's"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.allocator = BlockAllocator(num_blocks, layout.block_size)
        heads, dim, size = layout.num_kv_heads, layout.head_dim, layout.block_size
        storage = device.empty((2, layout.num_layers, num_blocks, size, heads, dim), dtype)
        # Views are made once: a captured step then holds them as constants instead of slicing anew per layer.
        self._keys = storage[0].unbind(0)
        self._values = storage[1].unbind(0)
        self._slot_keys = storage[0].flatten(1, 2).unbind(0)
        self._slot_values = storage[1].flatten(1, 2).unbind(0)

    def blocks(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [num_blocks, block_size, kv_heads, head_dim]."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one key and value per slot; [tokens] and [tokens, kv_heads, head_dim]."""
        self._slot_keys[layer].index_copy_(0, slots, keys)
        self._slot_values[layer].index_copy_(0, slots, values)


@dataclass(frozen=True)
class CausalPrefill:
    """Attention state of a prompt batch: causal over the batch itself, and written to ``cache`` if there is one.

    ``slots`` has one slot per token, batch-major. Shorter prompts are padded on the right, their padding to slot 0.
    """

    cache: PagedKVCache | None = None
    slots: torch.Tensor | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] (key, value: kv_heads) to [batch, tokens, heads, head_dim]."""
        if self.cache is not None and self.slots is not None:
            self.cache.write(layer, self.slots, _per_token(key), _per_token(value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return attended.transpose(1, 2)


@dataclass(frozen=True)
class PagedDecode:
    """Attention state of one decode step: one new token per row, the past read through the block tables."""

    cache: PagedKVCache
    slots: torch.Tensor
    """[batch]: where each row's new token goes."""
    block_tables: torch.Tensor
    """[batch, columns]."""
    context_lens: torch.Tensor
    """[batch]: tokens to attend to, the new one included; at least 1."""
    chunk_blocks: int
    max_chunks: int | None = None
    """Leave out the chunks after so many: the result is wrong, the memory it takes is right."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, heads, 1, head_dim] (key, value: kv_heads) to [batch, 1, heads, head_dim]."""
        self.cache.write(layer, self.slots, _per_token(key), _per_token(value))
        keys, values = self.cache.blocks(layer)
        attended = paged_attention(
            query.squeeze(2),
            keys,
            values,
            self.block_tables,
            self.context_lens,
            scale,
            self.chunk_blocks,
            self.max_chunks,
        )
        return attended.unsqueeze(1)


def chunk_blocks_for(layout: KVLayout, batch: int, columns: int, limit_bytes: int | None = None) -> int:
    """How many block columns decode attention may gather at once within ``limit_bytes`` (CHUNK_BYTES); at least 1."""
    limit = CHUNK_BYTES if limit_bytes is None else limit_bytes
    column_bytes = batch * layout.block_size * layout.num_kv_heads * layout.head_dim * torch.float32.itemsize
    return max(1, min(columns, limit // column_bytes))


def paged_attention(
    query: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    chunk_blocks: int,
    max_chunks: int | None = None,
) -> torch.Tensor:
    """Attention of one query per row over the first ``context_lens`` tokens of its blocks.

    ``query`` is [batch, heads, head_dim], as is the result; blocks are [num_blocks, block_size, kv_heads, head_dim],
    tables [batch, columns]. Softmax runs online over ``chunk_blocks`` columns at a time, in float32, so the memory
    needed does not grow with the context. What lies past a row's context is never used, not even when it is NaN.
    ``max_chunks`` is for tensors without data, see ``PagedDecode``.
    """
    batch, heads, dim = query.shape
    block_size, kv_heads = key_blocks.shape[1:3]
    queries = (query.float() * scale).view(batch, kv_heads, heads // kv_heads, dim)
    lowest = torch.finfo(torch.float32).min
    top = queries.new_full((*queries.shape[:3], 1), lowest)
    total = torch.zeros_like(top)
    mixed = torch.zeros_like(queries)
    for start in range(0, block_tables.shape[1], chunk_blocks)[:max_chunks]:
        columns = block_tables[:, start : start + chunk_blocks]
        first = start * block_size
        positions = torch.arange(first, first + columns.shape[1] * block_size, device=query.device)
        hidden = (positions[None] >= context_lens[:, None])[:, None, None]
        keys = _gather(key_blocks, columns)
        values = _gather(value_blocks, columns).masked_fill_(hidden.transpose(2, 3), 0.0)
        scores = (queries @ keys.transpose(2, 3)).masked_fill_(hidden, lowest)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - new_top).exp_(), (top - new_top).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        top = new_top
    return (mixed / total).to(query.dtype).view(batch, heads, dim)


def _gather(blocks: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The blocks of [batch, columns] as a float32 copy, [batch, kv_heads, columns x block_size, head_dim]."""
    gathered = blocks[columns].flatten(1, 2).transpose(1, 2)  # indexing copies, so the caller may mask in place
    return gathered.to(torch.float32, memory_format=torch.contiguous_format)


def _per_token(states: torch.Tensor) -> torch.Tensor:
    """[batch, kv_heads, tokens, head_dim] to [batch x tokens, kv_heads, head_dim]."""
    return states.transpose(1, 2).flatten(0, 1)
