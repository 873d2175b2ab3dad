"""Writes a small checkpoint with random weights in the real format: for trying out, and for tests.

Config, key names, per-expert tensors, shards and index are those of the published model; only the sizes differ. The
numbers are scaled so that every part of the model does something: finite logits that depend on their input, experts
that are all chosen, sound that neither vanishes nor clips. Needs numpy, not torch.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagelaunch.core.errors import UsageError
from stagelaunch.weights.index import CONFIG_NAME, INDEX_NAME
from stagelaunch.weights.omni_spec import COMPONENTS, expected_tensors

NUM_SHARDS = 4
"""Shard borders lie at equal sizes, so they fall inside components: one shard holds two, one component is in two."""

_ROPE = {"rope_type": "default", "type": "default", "interleaved": True}


def _mrope(*section: int) -> dict[str, Any]:
    return {**_ROPE, "mrope_section": list(section)}


TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "dtype": "float32",
    "enable_audio_output": True,
    "im_start_token_id": 4000,
    "im_end_token_id": 4001,
    "system_token_id": 4002,
    "user_token_id": 4003,
    "assistant_token_id": 4004,
    "tts_pad_token_id": 4005,
    "tts_bos_token_id": 4006,
    "tts_eos_token_id": 4007,
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "audio_token_id": 4010,
        "image_token_id": 4011,
        "video_token_id": 4012,
        "audio_start_token_id": 4013,
        "audio_end_token_id": 4014,
        "vision_start_token_id": 4015,
        "vision_end_token_id": 4016,
        "user_token_id": 4003,
        "position_id_per_seconds": 13,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 128,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": _mrope(12, 10, 10),
        },
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "downsample_hidden_size": 16,
            "num_mel_bins": 128,
            "output_dim": 256,
            "max_source_positions": 1500,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
            "activation_function": "gelu",
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 256,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            "hidden_act": "gelu_pytorch_tanh",
        },
    },
    "talker_config": {
        "model_type": "qwen3_omni_moe_talker",
        "accept_hidden_layer": 2,
        "thinker_hidden_size": 256,
        "num_code_groups": 4,
        "spatial_merge_size": 2,
        "position_id_per_seconds": 13,
        "audio_token_id": 4010,
        "image_token_id": 4011,
        "video_token_id": 4012,
        "audio_start_token_id": 4013,
        "vision_start_token_id": 4015,
        "codec_bos_id": 1030,
        "codec_eos_token_id": 1031,
        "codec_pad_id": 1032,
        "codec_think_bos_id": 1033,
        "codec_think_eos_id": 1034,
        "codec_nothink_id": 1035,
        "speaker_id": {"ethan": 1040, "chelsie": 1041},
        "text_config": {
            "model_type": "qwen3_omni_moe_talker_text",
            "vocab_size": 1088,
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": _mrope(6, 5, 5),
        },
        "code_predictor_config": {
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_code_groups": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
        },
    },
    "code2wav_config": {
        "model_type": "qwen3_omni_moe_code2wav",
        "codebook_size": 1024,
        "num_quantizers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": 72,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "layer_scale_initial_scale": 0.01,
        "decoder_dim": 64,
        "upsample_rates": [4, 3],
        "upsampling_ratios": [2],
        "rope_theta": 10000.0,
    },
}
"""Every part of the published model, at a thousandth of its size."""

Array = NDArray[Any]


def write_checkpoint(
    out_dir: Path, *, seed: int = 0, config: Mapping[str, Any] = TINY_CONFIG, force: bool = False
) -> int:
    """Write a float32 checkpoint of ``config`` to ``out_dir`` and return the bytes of its weights.

    The same seed gives the same bytes. ``out_dir`` appears complete or not at all. UsageError if it exists and is not
    empty, unless ``force`` is given and it holds a checkpoint, which is then replaced.
    """
    _check_replaceable(out_dir, force)
    staging = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.tmp")
    try:
        staging.mkdir(parents=True)
        total_bytes = _write_files(staging, dict(config), seed)
        if out_dir.exists():
            replaced = staging.with_suffix(".old")
            out_dir.rename(replaced)
            staging.rename(out_dir)
            shutil.rmtree(replaced)
        else:
            staging.rename(out_dir)
    except OSError as error:
        raise UsageError(f"cannot write {out_dir}: {error.strerror}; choose another directory") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return total_bytes


def _check_replaceable(out_dir: Path, force: bool) -> None:
    """Replacing removes what is there: only ever a checkpoint, never whatever directory a typo names."""
    if not os.path.lexists(out_dir):
        return
    if not out_dir.is_dir():
        raise UsageError(f"cannot write {out_dir}: it is not a directory; choose another directory")
    if not any(out_dir.iterdir()):
        return
    if not force:
        raise UsageError(f"cannot write {out_dir}: it exists and is not empty; use --force or another directory")
    if not (out_dir / INDEX_NAME).exists():
        raise UsageError(f"cannot replace {out_dir}: it does not hold a checkpoint; choose another directory")


def _write_files(directory: Path, config: dict[str, Any], seed: int) -> int:
    shapes = {key: shape for component in COMPONENTS for key, shape in expected_tensors(config, component).items()}
    total_bytes = sum(4 * prod(shape) for shape in shapes.values())
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(_split(shapes, total_bytes), start=1):
        shard = f"model-{number:05d}-of-{NUM_SHARDS:05d}.safetensors"
        write_shard(directory / shard, {key: random_tensor(key, shapes[key], seed) for key in keys})
        weight_map.update(dict.fromkeys(keys, shard))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    return total_bytes


def _split(shapes: Mapping[str, tuple[int, ...]], total_bytes: int) -> list[list[str]]:
    """The keys of each shard, cut where a share of the bytes is full; sorted, as the hub's shards are."""
    shards: list[list[str]] = [[] for _ in range(NUM_SHARDS)]
    position = 0
    for key, shape in shapes.items():
        shards[min(position * NUM_SHARDS // total_bytes, NUM_SHARDS - 1)].append(key)
        position += 4 * prod(shape)
    return [sorted(keys) for keys in shards]


def write_shard(path: Path, tensors: Mapping[str, Array]) -> None:
    """One safetensors file of float32 arrays, laid out in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    arrays = {name: np.asarray(array, dtype="<f4") for name, array in tensors.items()}
    position = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [position, position + array.nbytes]}
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())


def random_tensor(key: str, shape: tuple[int, ...], seed: int) -> Array:
    """The tensor ``key`` of seed ``seed``, whatever else is written: mean and spread by the part it plays.

    No two tensors are equal, not even two norms: a loader that swaps them must not go unnoticed.
    """
    mean, spread = _mean_and_spread(key, shape)
    rng = np.random.default_rng([seed, zlib.crc32(key.encode())])
    noise = rng.standard_normal(shape, dtype=np.float32)
    return (noise * np.float32(spread) + np.float32(mean)).astype(np.float32)


def _mean_and_spread(key: str, shape: tuple[int, ...]) -> tuple[float, float]:
    match key.rsplit(".", 2)[-2:]:
        case [_, "gamma" | "scale"]:  # 1e-6 and 0.01 in an untrained model, which would mute the branch they scale
            return 0.3, 0.02
        case [_, "alpha" | "beta"]:  # exponentiated by the activation
            return 0.0, 0.1
        case [_, "bias"]:
            return 0.0, 0.02
        case [_, "weight"] if len(shape) == 1:
            return 1.0, 0.02
        case ["embed_tokens" | "pos_embed" | "code_embedding" | "codec_embedding", _]:
            return 0.0, 0.5
    fan_in = prod(shape[1:])
    if ".block.1.conv" in key:  # a transposed convolution: each output sees two taps of every input channel
        fan_in = 2 * shape[0]
    elif key.startswith("code2wav.upsample.") and key.endswith(".0.conv.weight"):
        fan_in = shape[0]
    # Every activation of the vocoder adds a positive mean: branches and output are scaled to stay within [-1, 1].
    gain = 0.1 if key.startswith("code2wav.decoder.") and (".conv2." in key or shape[0] == 1) else 1.0
    return 0.0, gain / sqrt(fan_in)
