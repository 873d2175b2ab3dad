"""Every byte has one place, experts included."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from stagelaunch.core.errors import CheckpointError
from stagelaunch.weights.index import CheckpointIndex, read_index
from stagelaunch.weights.omni_spec import COMPONENTS
from stagelaunch.weights.plan import ReadItem, TargetSpec, check_coverage, plan_component, state_dict_name
from stagelaunch.weights.synthetic import random_tensor
from stagelaunch.weights.validate import validate


@pytest.fixture(scope="module")
def index(tiny_checkpoint: Path) -> CheckpointIndex:
    return read_index(tiny_checkpoint)


@pytest.mark.parametrize(
    ("component", "hub", "ours"),
    [
        ("thinker", "thinker.model.layers.3.mlp.gate.weight", "model.language_model.layers.3.mlp.gate.weight"),
        ("thinker", "thinker.model.norm.weight", "model.language_model.norm.weight"),
        ("thinker", "thinker.audio_tower.ln_post.bias", "model.audio_tower.ln_post.bias"),
        ("thinker", "thinker.visual.pos_embed.weight", "model.visual.pos_embed.weight"),
        ("thinker", "thinker.lm_head.weight", "lm_head.weight"),
        ("talker", "talker.model.codec_embedding.weight", "model.codec_embedding.weight"),
        ("talker", "talker.code_predictor.model.norm.weight", "code_predictor.model.norm.weight"),
        ("code2wav", "code2wav.decoder.0.conv.bias", "decoder.0.conv.bias"),
    ],
)
def test_state_dict_names(component: str, hub: str, ours: str) -> None:
    assert state_dict_name(component, hub) == ours


@pytest.mark.parametrize("component", COMPONENTS)
def test_items_are_in_file_order_and_cover_all(index: CheckpointIndex, component: str) -> None:
    plan = plan_component(index, component)
    for before, after in pairwise(plan.items):
        assert (before.shard, before.end) <= (after.shard, after.begin)
    assert plan.total_bytes == sum(spec.num_bytes for spec in plan.targets.values())
    assert plan.total_bytes == sum(
        entry.end - entry.begin for key, entry in index.tensors.items() if key.startswith(f"{component}.")
    )


def test_one_shard_holds_two_components_and_one_component_is_in_two(index: CheckpointIndex) -> None:
    shards = {
        component: {item.shard.name for item in plan_component(index, component).items} for component in COMPONENTS
    }
    assert shards["thinker"] & shards["talker"]
    assert shards["talker"] & shards["code2wav"]
    assert len(shards["talker"]) > 1


def test_experts_land_in_their_slab(index: CheckpointIndex) -> None:
    """The slab assembled from the plan is what stacking and concatenating the hub's tensors gives."""
    block = "talker.model.layers.1.mlp.experts"

    def hub(expert: int, part: str) -> np.ndarray:
        key = f"{block}.{expert}.{part}_proj.weight"
        return random_tensor(key, index.tensors[key].shape, 0)

    plan = plan_component(index, "talker")
    target = "model.layers.1.mlp.experts.gate_up_proj"
    slab = bytearray(plan.targets[target].num_bytes)
    for item in plan.items:
        if item.target == target:
            with item.shard.open("rb") as file:
                file.seek(item.begin)
                slab[item.target_offset : item.target_offset + item.num_bytes] = file.read(item.num_bytes)
    expected = np.stack([np.concatenate([hub(e, "gate"), hub(e, "up")]) for e in range(8)])
    assert plan.targets[target].shape == expected.shape
    assert np.array_equal(np.frombuffer(slab, "<f4").reshape(expected.shape), expected)


def test_shared_experts_are_not_fused(index: CheckpointIndex) -> None:
    targets = plan_component(index, "talker").targets
    assert "model.layers.0.mlp.shared_expert.gate_proj.weight" in targets


def test_a_plan_is_refused_for_a_checkpoint_that_lacks_a_tensor(index: CheckpointIndex) -> None:
    tensors = {key: entry for key, entry in index.tensors.items() if key != "talker.codec_head.weight"}
    with pytest.raises(CheckpointError, match=r"talker\.codec_head\.weight"):
        plan_component(CheckpointIndex(index.model_dir, index.config, tensors), "talker")


def test_a_plan_is_refused_in_another_dtype(index: CheckpointIndex) -> None:
    with pytest.raises(CheckpointError, match="asks for bfloat16"):
        plan_component(index, "code2wav", "bfloat16")


def test_validate_takes_components_with_and_without_dtypes(index: CheckpointIndex) -> None:
    validate(index, COMPONENTS)
    validate(index, {"thinker": "float32", "talker": "auto"})
    with pytest.raises(CheckpointError) as caught:
        validate(index, {"thinker": "bfloat16", "code2wav": "float16"})
    assert "asks for bfloat16" in str(caught.value)
    assert "asks for float16" in str(caught.value)


def runs(*spans: tuple[int, int]) -> Iterator[ReadItem]:
    """Reads of target ``t`` that write ``[begin, end)``."""
    return (ReadItem(Path("s"), 0, end - begin, "t", begin) for begin, end in spans)


SIXTEEN_BYTES = {"t": TargetSpec((4,), "float32")}


def test_exact_coverage_passes() -> None:
    check_coverage(runs((8, 16), (0, 8)), SIXTEEN_BYTES)


@pytest.mark.parametrize(
    "spans",
    [[], [(0, 12)], [(4, 16)], [(0, 4), (8, 16)], [(0, 8), (4, 16)], [(0, 16), (0, 16)], [(0, 8), (8, 20)]],
    ids=["nothing", "short end", "short start", "hole", "overlap", "twice", "beyond"],
)
def test_inexact_coverage_is_our_bug(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(RuntimeError, match="exactly once"):
        check_coverage(runs(*spans), SIXTEEN_BYTES)
