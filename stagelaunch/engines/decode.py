"""Thinker and talker as a stage: prefill and decode over the paged cache, the decode step as captured graphs.

Knows no transformers: it drives a ``LanguageModel``. Called by ``torch_omni``; all compute runs in ``device.compute``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from stagelaunch.core.errors import StageError
from stagelaunch.core.ledger import KVLayout
from stagelaunch.devices.base import Device, Step
from stagelaunch.engines.base import EngineSpec, ProbeResult
from stagelaunch.engines.graphs import GraphSet, max_abs_diff
from stagelaunch.engines.paged import (
    FORECAST_CHUNKS,
    NULL_BLOCK,
    BlockTable,
    CausalPrefill,
    PagedDecode,
    PagedKVCache,
    chunk_blocks_for,
)

if TYPE_CHECKING:
    from stagelaunch.engines.omni_model import LanguageModel


class DecodeInputs(NamedTuple):
    """The static inputs of a decode step, all int64; one row per sequence."""

    token_ids: torch.Tensor
    """[batch]: the newest token of each sequence."""
    positions: torch.Tensor
    """[batch]"""
    slots: torch.Tensor
    """[batch]: where its keys and values go."""
    block_tables: torch.Tensor
    """[batch, columns for max_model_len]"""
    context_lens: torch.Tensor
    """[batch]: tokens to attend to, the newest included."""


@dataclass(frozen=True)
class DecodeRow:
    """The newest token of one sequence: the token at ``position``, whose past is in the blocks of ``table``."""

    token_id: int
    position: int
    table: BlockTable


class DecodeRunner:
    """A language model with its KV cache and its graphs."""

    def __init__(
        self, model: LanguageModel, spec: EngineSpec, layout: KVLayout, dtype: torch.dtype, device: Device
    ) -> None:
        self.kv_layout = layout
        self._model = model
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._columns = -(-spec.max_model_len // spec.block_size)
        self._graphs = GraphSet(device)
        self._cache: PagedKVCache | None = None

    @property
    def cache(self) -> PagedKVCache:
        """The KV cache. StageError when there is none."""
        if self._cache is None:
            raise StageError("cannot run a decode step: no KV cache is allocated; call allocate_kv first")
        return self._cache

    def run_largest_batch(self) -> None:
        """Prefill max_num_seqs prompts of equal length, without cache.

        The length is max_num_batched_tokens / max_num_seqs rounded up, so that the batch has at least that many
        tokens, and at most max_model_len: no larger batch can ever arrive. The head sees each prompt's last token only.
        """
        batch = self._spec.max_num_seqs
        length = min(-(-self._spec.max_num_batched_tokens // batch), self._spec.max_model_len)
        with self._device.compute():
            token_ids = torch.arange(batch * length, device=self._device.torch_device) % self._model.vocab_size
            hidden = self._last_hidden(token_ids.view(batch, length), [length] * batch, CausalPrefill())
            self._model.outputs(hidden)
        self._device.synchronize()

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the cache. StageError when there is one."""
        if self._cache is not None:
            raise StageError("cannot allocate the KV cache: there is one; release it first")
        self._cache = PagedKVCache(self.kv_layout, num_blocks, self._dtype, self._device)

    def release_kv(self) -> None:
        """Drop the cache. StageError while graphs are captured: they read and write its memory."""
        if len(self._graphs):
            raise StageError(
                f"cannot release the KV cache: {len(self._graphs)} graphs use its memory; release the graphs first"
            )
        self._cache = None

    def capture(self, size: int) -> None:
        """Capture the decode step of ``size`` rows, over padding rows that touch the null block only."""
        self._graphs.capture(size, self._step_of(size), self.new_inputs(size))

    def release_graphs(self) -> None:
        """Drop the graphs."""
        self._graphs.release()

    def prefill(self, prompts: Sequence[Sequence[int]], tables: Sequence[BlockTable]) -> tuple[torch.Tensor, ...]:
        """Run prompts of any lengths as one batch, their keys and values into the blocks of ``tables``.

        Returns what a decode step returns, for each prompt's last token.
        """
        width = max(map(len, prompts))
        padding = [[0] * (width - len(prompt)) for prompt in prompts]
        slots: list[int] = []
        for prompt, table, pad in zip(prompts, tables, padding, strict=True):
            slots += table.slots(0, len(prompt)) + [NULL_BLOCK * table.block_size] * len(pad)
        with self._device.compute():
            token_ids = self._on_device([[*prompt, *pad] for prompt, pad in zip(prompts, padding, strict=True)])
            state = CausalPrefill(self.cache, self._on_device(slots))
            return self._model.outputs(self._last_hidden(token_ids, [len(prompt) for prompt in prompts], state))

    def decode(self, rows: Sequence[DecodeRow]) -> tuple[torch.Tensor, ...]:
        """One decode step through the smallest graph that holds ``rows``; eagerly without one.

        Returns copies of logits [rows, vocab], and for the talker codes [rows, num_code_groups].
        """
        if (found := self._graphs.smallest_for(len(rows))) is None:
            return self.decode_eagerly(rows, len(rows))
        _, graph = found
        self._fill(DecodeInputs(*graph.inputs), rows)
        graph.replay()
        with self._device.compute():
            return tuple(output[: len(rows)].clone() for output in graph.outputs)

    def decode_eagerly(self, rows: Sequence[DecodeRow], batch: int) -> tuple[torch.Tensor, ...]:
        """The same step without a graph, ``rows`` padded to ``batch``."""
        inputs = self.new_inputs(batch)
        self._fill(inputs, rows)
        with self._device.compute():
            return tuple(output[: len(rows)] for output in self._step_of(batch)(*inputs))

    def probe(self) -> ProbeResult:
        """Prefill a prompt of three blocks (as far as max_model_len allows), then decode: graph against eager.

        Both write the same keys and values to the same slot, so running the step twice changes nothing.
        """
        length = max(1, min(2 * self._spec.block_size + 1, self._spec.max_model_len - 1))
        prompt = [(7 * token + 3) % self._model.vocab_size for token in range(length)]
        table = self.cache.allocator.allocate(length + 1)
        try:
            logits = self.prefill([prompt], [table])[0]
            rows = [DecodeRow(int(logits[0].argmax()), length, table)]
            found = self._graphs.smallest_for(1)
            batch = 1 if found is None else found[0]
            begun_s = perf_counter()
            outputs = self.decode(rows)
            self._device.synchronize()
            elapsed_s = perf_counter() - begun_s
            with self._device.compute():
                difference = max_abs_diff(outputs, self.decode_eagerly(rows, batch), rows=1)
        finally:
            self.cache.allocator.free(table)
        return ProbeResult(batch, found is not None, difference, tuple(outputs[0].shape), elapsed_s)

    def new_inputs(self, size: int) -> DecodeInputs:
        """Resident inputs of ``size`` padding rows: token 0, alone in the null block."""
        shapes = ((size,), (size,), (size,), (size, self._columns), (size,))
        inputs = DecodeInputs._make(self._device.empty(shape, torch.int64) for shape in shapes)
        self._fill(inputs, ())
        return inputs

    def _fill(self, inputs: DecodeInputs, rows: Sequence[DecodeRow]) -> None:
        """Write ``rows`` into the static inputs, padding rows after them."""
        padding = DecodeRow(0, 0, BlockTable((NULL_BLOCK,), self._spec.block_size))
        padded = [*rows, *[padding] * (len(inputs.token_ids) - len(rows))]
        values = DecodeInputs(
            torch.tensor([row.token_id for row in padded]),
            torch.tensor([row.position for row in padded]),
            torch.tensor([row.table.slots(row.position, row.position + 1)[0] for row in padded]),
            torch.tensor([row.table.row(self._columns) for row in padded]),
            torch.tensor([row.position + 1 for row in padded]),
        )
        for target, source in zip(inputs, values, strict=True):
            self._device.copy_from_host(target, source)

    def _step_of(self, size: int) -> Step:
        """The decode step over ``DecodeInputs`` of ``size`` rows; its outputs are the model's ``outputs``."""
        cache, model = self.cache, self._model
        chunk_blocks = chunk_blocks_for(self.kv_layout, size, self._columns)
        # A long context is a hundred chunks a layer: minutes of a forecast that wants only the memory of one.
        max_chunks = None if self._device.holds_data else FORECAST_CHUNKS

        def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs = DecodeInputs(*tensors)
            state = PagedDecode(cache, inputs.slots, inputs.block_tables, inputs.context_lens, chunk_blocks, max_chunks)
            hidden = model.hidden_states(inputs.token_ids[:, None], inputs.positions[:, None], state)
            return model.outputs(hidden[:, 0])

        return step

    def _last_hidden(self, token_ids: torch.Tensor, lengths: Sequence[int], state: CausalPrefill) -> torch.Tensor:
        """Hidden state of each prompt's last token, [batch, hidden], from [batch, tokens] ids padded on the right."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None].expand_as(token_ids)
        hidden = self._model.hidden_states(token_ids, positions, state)
        last = self._on_device([length - 1 for length in lengths])
        return hidden[torch.arange(len(lengths), device=hidden.device), last]

    def _on_device(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device.torch_device)
