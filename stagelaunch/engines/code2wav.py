"""The vocoder as a stage: one chunk of frames per row, no KV cache, the chunk as captured graphs.

Knows no transformers: it drives a ``Code2WavModel``. Called by ``torch_omni``; all compute runs in ``device.compute``.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from stagelaunch.core.errors import StageError
from stagelaunch.devices.base import Device
from stagelaunch.engines.base import EngineSpec, ProbeResult
from stagelaunch.engines.graphs import GraphSet, max_abs_diff

if TYPE_CHECKING:
    from stagelaunch.engines.omni_model import Code2WavModel

DEFAULT_CHUNK_FRAMES = 325
"""300 new frames and 25 of left context: what transformers decodes at a time, 26 s of speech."""


class Code2WavRunner:
    """The vocoder with its graphs."""

    kv_layout = None

    def __init__(self, model: Code2WavModel, spec: EngineSpec, device: Device, chunk_frames: int) -> None:
        self._model = model
        self._device = device
        self._chunk_frames = chunk_frames
        self._graphs = GraphSet(device)
        by_tokens = spec.max_num_batched_tokens // (chunk_frames * model.num_quantizers)
        self.largest_batch = max(1, min(max(by_tokens, *spec.capture_sizes, 0), spec.max_num_seqs))
        """Chunks at once: as many as max_num_batched_tokens codes make, or the largest graph takes if that is more;
        at least 1 and at most max_num_seqs."""

    def run_largest_batch(self) -> None:
        """One chunk of every row of the largest batch."""
        codes = self.new_codes(self.largest_batch)
        with self._device.compute():
            self._model.forward(codes)
        self._device.synchronize()

    def allocate_kv(self, num_blocks: int) -> None:
        """StageError: this stage has no KV cache."""
        raise StageError(f"cannot allocate {num_blocks} KV blocks: code2wav keeps no KV cache; size it without one")

    def release_kv(self) -> None:
        """Nothing to drop."""

    def capture(self, size: int) -> None:
        """Capture one chunk of ``size`` rows. StageError above the largest batch, whose memory the profile measured."""
        if size > self.largest_batch:
            raise StageError(
                f"cannot capture {size} chunks of {self._chunk_frames} frames: the stage's largest batch is "
                f"{self.largest_batch}, and its profile has not seen more; list the size in the stage's graphs, "
                "or raise max_num_seqs"
            )
        self._graphs.capture(size, self._step, (self.new_codes(size),))

    def release_graphs(self) -> None:
        """Drop the graphs."""
        self._graphs.release()

    def probe(self) -> ProbeResult:
        """One chunk through the smallest graph, compared with eager."""
        found = self._graphs.smallest_for(1)
        size = 1 if found is None else found[0]
        codes = self.new_codes(size)
        begun_s = perf_counter()
        wav = self.decode(codes)
        self._device.synchronize()
        elapsed_s = perf_counter() - begun_s
        with self._device.compute():
            difference = max_abs_diff((wav,), self._step(codes), rows=size)
        return ProbeResult(size, found is not None, difference, tuple(wav.shape), elapsed_s)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """[rows, num_quantizers, chunk_frames] to [rows, 1, samples], through the smallest graph that holds the rows.

        Eagerly without one. A copy: the next chunk does not overwrite it.
        """
        rows = len(codes)
        found = self._graphs.smallest_for(rows)
        with self._device.compute():
            if found is None:
                return self._model.forward(codes)
            _, graph = found
            graph.inputs[0][:rows].copy_(codes)
        graph.replay()
        with self._device.compute():
            return graph.outputs[0][:rows].clone()

    def new_codes(self, size: int) -> torch.Tensor:
        """Resident codes of ``size`` rows, each row different and the same each time."""
        shape = (size, self._model.num_quantizers, self._chunk_frames)
        codes = self._device.empty(shape, torch.int64)
        count = codes.numel()
        self._device.copy_from_host(codes, (torch.arange(count) * 31 % self._model.codebook_size).view(shape))
        return codes

    def _step(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self._model.forward(*inputs),)
