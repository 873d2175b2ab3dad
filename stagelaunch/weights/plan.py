"""Where every byte of a component goes: from its place in a shard to its place in a parameter of the module.

The hub stores one tensor per expert and projection; transformers' modules hold each layer's experts fused. Gate and up
of expert ``e`` lie one after the other in ``experts.gate_up_proj[e]``, so each hub tensor lands in one contiguous run
of its target and a byte offset says it all: nothing is concatenated, nothing is converted. Needs no torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

from stagelaunch.weights.index import CONFIG_NAME, DTYPE_BYTES, CheckpointIndex, FileStamp, TensorEntry
from stagelaunch.weights.omni_spec import expected_tensors
from stagelaunch.weights.validate import TORCH_NAMES, validate_component

_EXPERT = re.compile(r"(?P<block>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_THINKER_MOVES = (
    ("model.", "model.language_model."),
    ("audio_tower.", "model.audio_tower."),
    ("visual.", "model.visual."),
)


class TargetSpec(NamedTuple):
    """A parameter of the module, contiguous in memory."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name: ``float32``, ``bfloat16``, ``float16``."""

    @property
    def num_bytes(self) -> int:
        """Size of the parameter."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


ITEM_BYTES = {torch_name: DTYPE_BYTES[name] for name, torch_name in TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True)
class ReadItem:
    """Bytes ``[begin, end)`` of ``shard`` go to ``target``, ``target_offset`` bytes from its start."""

    shard: Path
    begin: int
    end: int
    target: str
    target_offset: int
    name: str = ""
    """The tensor's own name in the checkpoint."""

    @property
    def num_bytes(self) -> int:
        """Length of the run."""
        return self.end - self.begin


@dataclass(frozen=True)
class WeightPlan:
    """All reads that fill one component. ``items`` are in file order; together they cover every target exactly once.

    Nothing is tied and nothing is absent: every persistent tensor of the module is a target. Buffers that are
    computed from the config (rotary frequencies, audio sinusoids, ``code_offset``) are in no checkpoint and not here.
    """

    component: str
    items: tuple[ReadItem, ...]
    targets: Mapping[str, TargetSpec]
    total_bytes: int
    headers_only: bool = False
    """The files have no data: the plan is for counting, ``fill`` refuses it."""
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)
    """Of config.json and the shards, as they were when the plan was made."""


def plan_component(index: CheckpointIndex, component: str, dtype: str = "auto") -> WeightPlan:
    """The reads that fill ``component``'s transformers module, by the names of its state dict.

    Raises CheckpointError if the checkpoint is not exactly the component its config describes, in ``dtype``.
    """
    validate_component(index, component, dtype)
    return plan_valid(index, component)


def plan_valid(index: CheckpointIndex, component: str) -> WeightPlan:
    """``plan_component`` for a component that was validated already."""
    expected = expected_tensors(index.config, component)
    num_experts = _experts_per_block(expected)
    items: list[ReadItem] = []
    targets: dict[str, TargetSpec] = {}
    for key in expected:
        entry = index.tensors[key]
        target, shape, offset = _place(component, entry, num_experts)
        targets[target] = TargetSpec(shape, TORCH_NAMES[entry.dtype])
        items.append(ReadItem(entry.shard, entry.begin, entry.end, target, offset, key))
    items.sort(key=lambda item: (str(item.shard), item.begin))
    check_coverage(items, targets)
    total_bytes = sum(item.num_bytes for item in items)
    used = {index.model_dir / CONFIG_NAME, *(item.shard for item in items)}
    stamps = {path: stamp for path, stamp in index.stamps.items() if path in used}
    return WeightPlan(component, tuple(items), targets, total_bytes, index.headers_only, stamps)


def state_dict_name(component: str, hub_key: str) -> str:
    """Name of a hub tensor in its component's state dict, experts still apart. transformers moved the thinker's."""
    name = hub_key.removeprefix(f"{component}.")
    if component == "thinker":
        for old, new in _THINKER_MOVES:
            if name.startswith(old):
                return new + name.removeprefix(old)
    return name


def _experts_per_block(keys: Iterable[str]) -> Mapping[str, int]:
    """Number of experts of each MoE block, by the hub prefix of the block."""
    counts: dict[str, int] = defaultdict(int)
    for key in keys:
        match = _EXPERT.fullmatch(key)
        if match is not None and match["part"] == "down":
            counts[match["block"]] += 1
    return counts


def _place(component: str, entry: TensorEntry, num_experts: Mapping[str, int]) -> tuple[str, tuple[int, ...], int]:
    """Target, its shape, and the byte offset of ``entry`` in it."""
    match = _EXPERT.fullmatch(entry.name)
    if match is None:
        return state_dict_name(component, entry.name), entry.shape, 0
    block = state_dict_name(component, match["block"])
    count, expert, size = num_experts[match["block"]], int(match["expert"]), entry.end - entry.begin
    rows, columns = entry.shape
    if match["part"] == "down":
        return f"{block}.down_proj", (count, rows, columns), expert * size
    half = {"gate": 0, "up": 1}[match["part"]]
    return f"{block}.gate_up_proj", (count, 2 * rows, columns), (2 * expert + half) * size


def check_coverage(items: Iterable[ReadItem], targets: Mapping[str, TargetSpec]) -> None:
    """Every byte of every target is written exactly once. RuntimeError otherwise: a plan must never leave noise."""
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in targets}
    for item in items:
        runs[item.target].append((item.target_offset, item.target_offset + item.num_bytes))
    for name, spec in targets.items():
        ends = [(0, 0), *sorted(runs[name]), (spec.num_bytes, spec.num_bytes)]
        if any(before[1] != after[0] for before, after in pairwise(ends)):
            raise RuntimeError(f"the reads planned for {name} do not cover its {spec.num_bytes} bytes exactly once")
