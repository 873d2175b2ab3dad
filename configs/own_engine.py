"""A whole engine in one file, to start yours from: a small decoder with made-up weights and a paged KV cache.

Not a model, and it serves nobody: it shows how an engine takes device memory and gives it back. `docs/engine.md` says
who calls what and when; `PYTHONPATH=configs stagelaunch up configs/own-engine.yaml` boots it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from stagelaunch.core.ledger import KVLayout
from stagelaunch.devices.base import Device, Graph
from stagelaunch.engines.base import EngineSpec, ProbeResult, Progress

VOCAB, HEADS, HEAD_DIM = 1000, 4, 32
HIDDEN = HEADS * HEAD_DIM
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From layer, query, key and value, each [batch, heads, tokens, head_dim], to the same shape."""


class OwnEngine:
    """A decoder of ``options: {layers: N}`` layers. See ``stagelaunch.engines.base.Engine``."""

    def __init__(self, spec: EngineSpec) -> None:
        # Options are texts; what is wrong with them shows here, before a device is touched.
        self._layers = int(spec.options.get("layers", "2"))
        self._dtype = torch.float32 if spec.dtype == "auto" else getattr(torch, spec.dtype)
        self._spec = spec
        self._weights: dict[str, torch.Tensor] = {}
        self._cache: torch.Tensor | None = None
        self._graphs: dict[int, Graph] = {}
        self._pool: object | None = None

    def import_libraries(self) -> None:
        """Nothing is left to import: torch came with this module, once for all stages."""

    def allocate_weights(self, device: Device) -> None:
        """Everything a stage keeps comes from ``empty``: what is taken in another way is not counted."""
        self._device = device
        shapes = {"embedding": (VOCAB, HIDDEN), "head": (HIDDEN, VOCAB)}
        shapes |= {f"qkv.{layer}": (HIDDEN, 3 * HIDDEN) for layer in range(self._layers)}
        self._weights = {name: device.empty(shape, self._dtype) for name, shape in shapes.items()}

    def read_weights(self, progress: Progress) -> None:
        """Made on the host, then copied: no lock is held, so no device memory may be taken."""
        done, total = 0, sum(weight.nbytes for weight in self._weights.values())
        generator = torch.Generator().manual_seed(0)
        for weight in self._weights.values():
            values = torch.randn(weight.shape, generator=generator) / HIDDEN**0.5
            self._device.copy_from_host(weight, values.to(self._dtype))
            done += weight.nbytes
            progress(done, total)

    def run_largest_batch(self) -> None:
        """As many prompts as there may be, as long as they may be together. There is no KV cache yet."""
        batch = self._spec.max_num_seqs
        length = min(-(-self._spec.max_num_batched_tokens // batch), self._spec.max_model_len)
        # What is computed in here is counted, as activations.
        with self._device.compute():
            tokens = torch.zeros((batch, length), dtype=torch.int64, device=self._device.torch_device)
            self._logits(tokens, _causal)

    @property
    def kv_layout(self) -> KVLayout:
        """What one block costs. The ledger divides what is left of the budget by it."""
        return KVLayout(self._layers, HEADS, HEAD_DIM, self._dtype.itemsize, self._spec.block_size)

    def allocate_kv(self, num_blocks: int) -> None:
        """Exactly ``num_blocks x block_bytes``. Block 0, the null block, is of no request: padding writes there."""
        slots = num_blocks * self._spec.block_size
        self._cache = self._device.empty((2, self._layers, slots, HEADS, HEAD_DIM), self._dtype)
        # What is in fresh memory may be NaN, which no mask hides: 0 x NaN is NaN.
        self._cache.zero_()

    def release_kv(self) -> None:
        """Only after ``release_graphs``: a graph holds the memory it reads."""
        self._cache = None

    def capture(self, size: int) -> None:
        """One pool for all: the largest graph comes first, and the smaller ones run in its memory."""
        if self._pool is None:
            self._pool = self._device.new_graph_pool()
        self._graphs[size] = self._device.capture(self._step, self._padding(size), self._pool)

    def release_graphs(self) -> None:
        """The memory of a pool is free when the pool and all its graphs are gone."""
        self._graphs.clear()
        self._pool = None

    def probe(self) -> ProbeResult:
        """A request of a block and a token through the smallest graph, its last step compared with the same, eager."""
        graph = self._graphs[min(self._graphs)] if self._graphs else None
        tokens, positions, tables = inputs = graph.inputs if graph else self._padding(1)
        # Nobody else is served here. A real engine asks its block allocator.
        self._device.copy_from_host(tables[0], torch.arange(1, tables.shape[1] + 1))
        began_s = time.perf_counter()
        for position in range(min(self._spec.block_size + 1, self._spec.max_model_len)):
            tokens[0], positions[0] = position % VOCAB, position
            (output,) = self._run(graph, inputs)
        elapsed_s = time.perf_counter() - began_s
        # It writes the same keys and values to the same place, so doing it again changes nothing.
        (eager,) = self._run(None, inputs)
        # The row of the request only: where padding writes, all rows of padding write.
        difference = float((output[0].double() - eager[0].double()).abs().max())
        return ProbeResult(len(tokens), graph is not None, difference, tuple(output.shape), elapsed_s)

    def close(self) -> None:
        """Drop every tensor of the device. May come before ``allocate_weights``, and twice."""
        self.release_graphs()
        self.release_kv()
        self._weights = {}

    def _padding(self, size: int) -> tuple[torch.Tensor, ...]:
        """Inputs of a step that stay where they are: token, position, blocks of each row. Zeros: the null block."""
        columns = -(-self._spec.max_model_len // self._spec.block_size)
        return tuple(self._device.empty(shape, torch.int64).zero_() for shape in ((size,), (size,), (size, columns)))

    def _run(self, graph: Graph | None, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if graph is not None:
            graph.replay()
            return graph.outputs
        with self._device.compute():
            return self._step(*inputs)

    def _step(self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One token more for each row. Nothing in it depends on a tensor's value, or it could not be captured."""
        assert self._cache is not None
        all_keys, all_values = self._cache
        size = self._spec.block_size
        offsets = torch.arange(size, device=tables.device)
        # Every slot of each row's blocks, in the order of its tokens; the newest token goes to the one at its position.
        slots = (tables[:, :, None] * size + offsets).flatten(1)
        newest = slots.gather(1, positions[:, None])[:, 0]
        seen = torch.arange(slots.shape[1], device=tables.device) <= positions[:, None]

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = all_keys[layer], all_values[layer]
            keys.index_copy_(0, newest, key[:, :, 0])
            values.index_copy_(0, newest, value[:, :, 0])
            past = (keys[slots].transpose(1, 2), values[slots].transpose(1, 2))
            return scaled_dot_product_attention(query, *past, attn_mask=seen[:, None, None])

        return (self._logits(tokens[:, None], attend),)

    def _logits(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Of each row's last token, [batch, VOCAB], from tokens [batch, length]."""
        hidden = self._weights["embedding"][tokens]
        for layer in range(self._layers):
            states = (hidden @ self._weights[f"qkv.{layer}"]).view(*tokens.shape, 3, HEADS, HEAD_DIM)
            query, key, value = states.permute(2, 0, 3, 1, 4)
            hidden = hidden + attend(layer, query, key, value).transpose(1, 2).flatten(2)
        return hidden[:, -1] @ self._weights["head"]


def _causal(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of prompts over themselves."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)
