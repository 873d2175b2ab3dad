"""The spec against transformers itself, key by key, and against the published sizes."""

from __future__ import annotations

import copy
from math import prod
from pathlib import Path
from typing import Any

import pytest

from stagelaunch.core.errors import CheckpointError
from stagelaunch.core.ledger import KVLayout
from stagelaunch.weights.index import CheckpointIndex, TensorEntry
from stagelaunch.weights.omni_spec import COMPONENTS, component_dtype, expected_tensors, kv_layout
from stagelaunch.weights.plan import plan_component
from stagelaunch.weights.synthetic import TINY_CONFIG, published_config

PUBLISHED = published_config()


def changed(**changes: Any) -> dict[str, Any]:
    """The tiny config with values replaced at dotted paths (``__`` for the dot); ``...`` removes the key."""
    config = copy.deepcopy(TINY_CONFIG)
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = config
        for parent in parents:
            section = section[parent]
        if value is ...:
            del section[key]
        else:
            section[key] = value
    return config


CONFIGS = {
    "published": PUBLISHED,
    "tiny": TINY_CONFIG,
    # All that has no default, and nothing else: every other number is transformers' own.
    "defaults": {
        "dtype": "float32",
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 96}},
    },
    "biased": changed(
        thinker_config__text_config__attention_bias=True,
        talker_config__text_config__attention_bias=True,
        talker_config__code_predictor_config__attention_bias=True,
        code2wav_config__attention_bias=True,
    ),
    "dense layers": changed(
        thinker_config__text_config__mlp_only_layers=[1],
        thinker_config__text_config__intermediate_size=96,
        talker_config__text_config__mlp_only_layers=[0],
    ),
    "sparse steps": changed(
        thinker_config__text_config__decoder_sparse_step=2, talker_config__text_config__decoder_sparse_step=2
    ),
    "no experts": changed(thinker_config__text_config__num_experts=0),
    "null lists": changed(thinker_config__text_config__mlp_only_layers=None),
    "no head_dim": changed(
        thinker_config__text_config__head_dim=...,
        talker_config__text_config__head_dim=...,
        talker_config__code_predictor_config__head_dim=...,
    ),
    "code2wav with head_dim": changed(code2wav_config__head_dim=32, code2wav_config__num_key_value_heads=2),
    "other upsampling": changed(
        code2wav_config__upsample_rates=[5, 3, 2],
        code2wav_config__upsampling_ratios=[2, 3],
        code2wav_config__decoder_dim=48,
    ),
    "other towers": changed(
        thinker_config__vision_config__deepstack_visual_indexes=[],
        thinker_config__vision_config__spatial_merge_size=1,
        thinker_config__vision_config__temporal_patch_size=1,
        thinker_config__audio_config__num_mel_bins=80,
        thinker_config__audio_config__encoder_layers=1,
    ),
    "other names": changed(
        thinker_config__audio_config__encoder_layers=...,
        thinker_config__audio_config__num_hidden_layers=3,
        thinker_config__audio_config__d_model=...,
        thinker_config__audio_config__hidden_size=32,
        talker_config__text_config__num_experts=...,
        talker_config__text_config__num_local_experts=4,
    ),
}


def index_of(config: dict[str, Any], component: str) -> CheckpointIndex:
    """An index of a checkpoint that holds what the spec says; no file behind it."""
    entries, position = {}, 0
    for key, shape in expected_tensors(config, component).items():
        end = position + 4 * prod(shape)
        entries[key] = TensorEntry(key, Path("shard"), "F32", shape, position, end)
        position = end
    return CheckpointIndex(Path("."), config, entries)


def module_shapes(config: dict[str, Any], component: str) -> dict[str, tuple[int, ...]]:
    import torch

    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    whole_config = transformers.Qwen3OmniMoeConfig(**copy.deepcopy(config))
    module_class = {
        "thinker": transformers.Qwen3OmniMoeThinkerForConditionalGeneration,
        "talker": transformers.Qwen3OmniMoeTalkerForConditionalGeneration,
        "code2wav": Qwen3OmniMoeCode2Wav,
    }[component]
    with torch.device("meta"):
        module = module_class._from_config(getattr(whole_config, f"{component}_config"))
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_transformers(name: str, component: str) -> None:
    config = CONFIGS[name]
    plan = plan_component(index_of(config, component), component, "float32")
    assert {target: spec.shape for target, spec in plan.targets.items()} == module_shapes(config, component)


@pytest.mark.parametrize(
    ("component", "parameters", "gib"),
    [("thinker", 31_719_205_488, 59.082), ("talker", 3_324_596_480, 6.193), ("code2wav", 216_016_577, 0.402)],
)
def test_published_sizes(component: str, parameters: int, gib: float) -> None:
    count = sum(prod(shape) for shape in expected_tensors(PUBLISHED, component).values())
    assert count == parameters
    assert round(2 * count / 2**30, 3) == gib


def test_published_tensor_count() -> None:
    assert sum(len(expected_tensors(PUBLISHED, component)) for component in COMPONENTS) == 28_010


def test_published_kv() -> None:
    assert kv_layout(PUBLISHED, "thinker", 16, 2) == KVLayout(48, 4, 128, 2, 16)
    assert kv_layout(PUBLISHED, "talker", 16, 2) == KVLayout(20, 2, 128, 2, 16)
    assert KVLayout(48, 4, 128, 2, 16).bytes_per_token == 98_304
    assert KVLayout(20, 2, 128, 2, 16).bytes_per_token == 20_480
    assert kv_layout(PUBLISHED, "code2wav", 16, 2) is None


def test_kv_without_head_dim_uses_the_default_rule() -> None:
    layout = kv_layout(changed(thinker_config__text_config__head_dim=...), "thinker", 16, 4)
    assert layout is not None
    assert layout.head_dim == 256 // 4


BAD_VALUES = {
    "not a number": (changed(thinker_config__text_config__hidden_size="256"), "thinker", "text_config.hidden_size"),
    "true is no number": (changed(code2wav_config__hidden_size=True), "code2wav", "code2wav_config.hidden_size"),
    "null": (changed(thinker_config__text_config__vocab_size=None), "thinker", "text_config.vocab_size"),
    "zero": (changed(talker_config__text_config__num_attention_heads=0), "talker", "num_attention_heads"),
    "absurd": (changed(thinker_config__text_config__num_hidden_layers=10**9), "thinker", "num_hidden_layers"),
    "a million experts": (changed(talker_config__text_config__num_experts=10**6), "talker", "text_config.num_experts"),
    "heads do not divide": (
        changed(thinker_config__text_config__num_key_value_heads=3),
        "thinker",
        "num_key_value_heads",
    ),
    "section is a list": (changed(thinker_config__vision_config=[]), "thinker", "thinker_config.vision_config"),
    "list is a number": (changed(code2wav_config__upsample_rates=4), "code2wav", "code2wav_config.upsample_rates"),
    "list of texts": (changed(code2wav_config__upsampling_ratios=["2"]), "code2wav", "upsampling_ratios"),
    "flag is a text": (changed(code2wav_config__attention_bias="no"), "code2wav", "code2wav_config.attention_bias"),
    "too narrow": (changed(code2wav_config__decoder_dim=3), "code2wav", "code2wav_config.decoder_dim"),
    "tied thinker": (changed(thinker_config__tie_word_embeddings=True), "thinker", "tie_word_embeddings"),
    "tied talker": (changed(talker_config__tie_word_embeddings=True), "talker", "tie_word_embeddings"),
    "no shared expert": (
        changed(talker_config__text_config__shared_expert_intermediate_size=...),
        "talker",
        "talker_config.text_config.shared_expert_intermediate_size",
    ),
    "no spatial_merge_size": (changed(talker_config__spatial_merge_size=...), "talker", "spatial_merge_size"),
    "a model that does not speak": (changed(enable_audio_output=False), "code2wav", "enable_audio_output"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_are_named(name: str) -> None:
    config, component, key = BAD_VALUES[name]
    with pytest.raises(CheckpointError) as caught:
        expected_tensors(config, component)
    assert [fault.file for fault in caught.value.faults] == ["config.json"]
    assert key in str(caught.value)


def test_all_bad_values_at_once() -> None:
    config = changed(thinker_config__text_config__hidden_size=-1, thinker_config__vision_config__depth="x")
    with pytest.raises(CheckpointError) as caught:
        expected_tensors(config, "thinker")
    assert len(caught.value.faults) == 2


def test_a_silent_model_still_has_a_thinker() -> None:
    assert expected_tensors(changed(enable_audio_output=False), "thinker")


def test_no_such_component() -> None:
    with pytest.raises(ValueError, match="vocoder"):
        expected_tensors(TINY_CONFIG, "vocoder")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_of_the_config(key: str) -> None:
    assert component_dtype({key: "bfloat16"}) == "bfloat16"


@pytest.mark.parametrize("config", [{}, {"dtype": "int8"}, {"dtype": None}, {"torch_dtype": ["float32"]}])
def test_unusable_dtype_of_the_config(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="dtype"):
        component_dtype(config)
