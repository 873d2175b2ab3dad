"""The built-in engine: a component of Qwen3-Omni, loaded by our own loader and run by plain torch.

Walks one stage from nothing to a captured, probed model, as the worker tells it to; the thinker's and talker's running
is in ``decode``, the vocoder's in ``code2wav``, the model itself behind ``omni_model``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from stagelaunch.core.errors import StageError
from stagelaunch.core.ledger import KVLayout
from stagelaunch.core.units import format_size
from stagelaunch.devices.base import Device
from stagelaunch.devices.upload import Uploader
from stagelaunch.engines.base import EngineSpec, ProbeResult, Progress
from stagelaunch.engines.code2wav import DEFAULT_CHUNK_FRAMES, Code2WavRunner
from stagelaunch.engines.decode import DecodeRunner
from stagelaunch.weights.backends import require_installed
from stagelaunch.weights.files import require_unchanged
from stagelaunch.weights.index import read_config, read_index
from stagelaunch.weights.omni_spec import component_dtype, kv_layout
from stagelaunch.weights.plan import WeightPlan, plan_component
from stagelaunch.weights.plan_file import read_plan
from stagelaunch.weights.reader import fill

if TYPE_CHECKING:
    from stagelaunch.engines.omni_model import OmniModel

OPTIONS = ("chunk_frames", "experts_implementation")
"""``chunk_frames``: frames code2wav decodes at a time. ``experts_implementation``: transformers' way to run experts;
grouped_mm (the default) can be captured."""


class Runner(Protocol):
    """What ``decode`` and ``code2wav`` have in common: the part of Engine that runs a loaded model."""

    @property
    def kv_layout(self) -> KVLayout | None:
        """See Engine."""

    def run_largest_batch(self) -> None:
        """See Engine."""

    def allocate_kv(self, num_blocks: int) -> None:
        """See Engine."""

    def release_kv(self) -> None:
        """See Engine."""

    def capture(self, size: int) -> None:
        """See Engine."""

    def release_graphs(self) -> None:
        """See Engine."""

    def probe(self) -> ProbeResult:
        """See Engine."""


class TorchOmniEngine:
    """Thinker, talker or code2wav as an Engine."""

    preload = ("stagelaunch.engines.omni_model",)

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._chunk_frames = _chunk_frames(spec)
        self._plan: WeightPlan | None = None
        self._unfilled: dict[str, torch.Tensor] = {}
        self._uploader: Uploader | None = None
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner:
        """The model that runs. StageError before its weights are allocated, and after close."""
        if self._runner is None:
            raise StageError("cannot run the stage: its weights are not on a device; call allocate_weights first")
        return self._runner

    def import_libraries(self) -> None:
        """Import transformers and what reads the weights; StageError when one is missing or not the minor we know."""
        require_installed(self._spec.reading.backend)
        try:
            from stagelaunch.engines import omni_model  # noqa: F401  # imported here: it takes seconds
        except ImportError as error:
            raise StageError(
                f"cannot import transformers: {error}; pip install 'stagelaunch[torch]' into this environment"
            ) from error

    def allocate_weights(self, device: Device) -> None:
        """Check the checkpoint, build the module without memory, allocate every parameter and buffer on ``device``."""
        from stagelaunch.engines import omni_model

        spec = self._spec
        plan, config = _plan_of(spec)
        experts = spec.options.get("experts_implementation", "grouped_mm")
        model = omni_model.build(spec.component, config, experts)
        targets = {name: (target.shape, getattr(torch, target.dtype)) for name, target in plan.targets.items()}
        self._unfilled = model.materialise(targets, device)
        self._plan = plan
        # Here, because it may take device memory, which changes under this phase's lock only.
        self._uploader = None if device.fills_in_place else device.uploader()
        self._runner = self._new_runner(model, config, device)

    def _new_runner(self, model: OmniModel, config: dict[str, Any], device: Device) -> Runner:
        from stagelaunch.engines import omni_model

        spec = self._spec
        if isinstance(model, omni_model.Code2WavModel):
            return Code2WavRunner(model, spec, device, self._chunk_frames)
        assert isinstance(model, omni_model.LanguageModel)
        dtype = getattr(torch, component_dtype(config) if spec.dtype == "auto" else spec.dtype)
        layout = kv_layout(config, spec.component, spec.block_size, dtype.itemsize)
        assert layout is not None
        return DecodeRunner(model, spec, layout, dtype, device)

    def read_weights(self, progress: Progress) -> None:
        """Fill every parameter from the checkpoint; what the reader raises passes through."""
        if self._plan is None:
            raise StageError("cannot read the weights: nothing is allocated for them; call allocate_weights first")
        how = fill(self._plan, self._unfilled, self._uploader, progress, self._spec.reading)
        print(f"weights: {format_size(self._plan.total_bytes)} read from {self._spec.model_dir} ({how})")
        self._unfilled, self._uploader = {}, None

    @property
    def kv_layout(self) -> KVLayout | None:
        """Shape of the KV cache; None for code2wav."""
        return self.runner.kv_layout

    def run_largest_batch(self) -> None:
        """One forward of the largest batch; the runner's docstring says which that is."""
        self.runner.run_largest_batch()

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the KV cache, null block included."""
        self.runner.allocate_kv(num_blocks)

    def release_kv(self) -> None:
        """Drop the KV cache; its graphs must be gone."""
        self.runner.release_kv()

    def capture(self, size: int) -> None:
        """Capture the step of batch size ``size``."""
        self.runner.capture(size)

    def release_graphs(self) -> None:
        """Drop the graphs and their pool."""
        self.runner.release_graphs()

    def probe(self) -> ProbeResult:
        """One step through the graph, compared with eager."""
        return self.runner.probe()

    def close(self) -> None:
        """Drop graphs, KV cache and model. They are in no reference cycle: their memory returns now. Idempotent."""
        if self._runner is not None:
            self._runner.release_graphs()
            self._runner.release_kv()
        self._runner = self._plan = self._uploader = None
        self._unfilled = {}


def _plan_of(spec: EngineSpec) -> tuple[WeightPlan, dict[str, Any]]:
    """What is to be read and config.json: as the supervisor has found them, or else from the checkpoint's headers."""
    if spec.plan_file is None:
        index = read_index(spec.model_dir)
        return plan_component(index, spec.component, spec.dtype), index.config
    plan = read_plan(spec.plan_file)
    require_unchanged(plan.stamps)
    return plan, read_config(spec.model_dir)


def _chunk_frames(spec: EngineSpec) -> int:
    """The chunk length from the options. StageError for an option nobody knows or a length that is none."""
    if unknown := sorted(spec.options.keys() - set(OPTIONS)):
        raise StageError(f"cannot use options {', '.join(unknown)}: unknown; this engine knows {', '.join(OPTIONS)}")
    text = spec.options.get("chunk_frames", str(DEFAULT_CHUNK_FRAMES))
    if not text.isdecimal() or int(text) < 1:
        raise StageError(f"cannot use chunk_frames {text!r}: not a count of frames; give a whole number from 1")
    return int(text)
