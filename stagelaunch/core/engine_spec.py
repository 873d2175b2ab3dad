"""What an engine is to build: the part of a stage's config that an engine sees. Plain data, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagelaunch.core.reading import Backend, Reading

if TYPE_CHECKING:
    # Only its name: pydantic behind it would cost every worker a part of a second.
    from stagelaunch.core.config import Stage


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is to build, from the stage's config."""

    component: str
    model_dir: Path
    dtype: str
    """``float32``, ``bfloat16``, ``float16``, or ``auto``: the checkpoint's own."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    capture_sizes: tuple[int, ...]
    """Batch sizes to capture, largest first; empty: no graphs."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The stage's own ``options`` from the config, passed through."""
    reading: Reading = field(default_factory=Reading)
    """How the weights are to be read."""
    plan_file: Path | None = None
    """What is read from where, worked out by the supervisor (``weights.plan_file``); None: the engine has to."""


def spec_of(stage: Stage, model_dir: Path) -> EngineSpec:
    """What the engine of a stage is to build from the checkpoint in ``model_dir``."""
    return EngineSpec(
        component=stage.component,
        model_dir=model_dir,
        dtype=stage.dtype,
        max_num_seqs=stage.max_num_seqs,
        max_num_batched_tokens=stage.max_num_batched_tokens,
        max_model_len=stage.max_model_len,
        block_size=stage.block_size,
        capture_sizes=stage.capture_sizes,
        options=stage.options,
        reading=Reading(Backend(stage.weights.backend), stage.weights.threads),
    )


def spec_to_json(spec: EngineSpec) -> dict[str, Any]:
    """Plain JSON of a spec."""
    plain = {"model_dir": str(spec.model_dir), "capture_sizes": list(spec.capture_sizes)}
    plan_file = None if spec.plan_file is None else str(spec.plan_file)
    reading = {"backend": str(spec.reading.backend), "threads": spec.reading.threads}
    return {**spec.__dict__, **plain, "options": dict(spec.options), "reading": reading, "plan_file": plan_file}


def spec_from_json(body: Mapping[str, Any]) -> EngineSpec:
    """Inverse of ``spec_to_json``. KeyError or TypeError for anything else."""
    reading, plan_file = body["reading"], body["plan_file"]
    converted = {
        "model_dir": Path(body["model_dir"]),
        "capture_sizes": tuple(body["capture_sizes"]),
        "reading": Reading(Backend(reading["backend"]), reading["threads"]),
        "plan_file": None if plan_file is None else Path(plan_file),
    }
    return EngineSpec(**{**body, **converted})
