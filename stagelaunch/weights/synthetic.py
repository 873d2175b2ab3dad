"""Writes a small checkpoint with random weights, or one of any size with headers only: for trying out, and for tests.

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
from importlib.resources import files
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagelaunch.core.errors import UsageError
from stagelaunch.weights.index import CONFIG_NAME, DTYPE_BYTES, HEADERS_ONLY, INDEX_NAME
from stagelaunch.weights.omni_spec import COMPONENTS, Shape, component_dtype, expected_tensors
from stagelaunch.weights.validate import TORCH_NAMES

NUM_SHARDS = 4
"""Shard borders lie at equal sizes, so they fall inside components: one shard holds two, one component is in two."""
PUBLISHED_SHARDS = 15
"""Of Qwen3-Omni-30B-A3B."""

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
ARRAY_DTYPES = {np.dtype("<f4"): "F32", np.dtype("<u2"): "BF16"}
"""numpy's dtype -> safetensors' name. numpy has no bfloat16: it is held as its bits."""


def published_config() -> dict[str, Any]:
    """config.json of Qwen3-Omni-30B-A3B, as far as it decides shapes."""
    config: dict[str, Any] = json.loads(files("stagelaunch.weights").joinpath("qwen3_omni_30b_config.json").read_text())
    return config


def write_checkpoint(
    out_dir: Path,
    *,
    seed: int = 0,
    config: Mapping[str, Any] = TINY_CONFIG,
    force: bool = False,
    headers_only: bool = False,
    num_shards: int = NUM_SHARDS,
) -> int:
    """Write a checkpoint of ``config``, in its dtype, to ``out_dir`` and return the bytes of its weights.

    The same seed gives the same bytes. With ``headers_only`` the files are marked as such, have their full size and
    take no space on the disk. ``out_dir`` appears complete or not at all. UsageError if it exists and is not empty,
    unless ``force`` is given and it holds a checkpoint, which is then replaced.
    """
    _check_replaceable(out_dir, force)
    staging = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.tmp")
    try:
        staging.mkdir(parents=True)
        total_bytes = _write_files(staging, dict(config), None if headers_only else seed, num_shards)
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


def _write_files(directory: Path, config: dict[str, Any], seed: int | None, num_shards: int) -> int:
    """``seed`` None: headers only."""
    dtype = {torch_name: name for name, torch_name in TORCH_NAMES.items()}[component_dtype(config)]
    shapes = {key: shape for component in COMPONENTS for key, shape in expected_tensors(config, component).items()}
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(_split(shapes, num_shards), start=1):
        shard = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        if seed is None:
            _write_headers(directory / shard, {key: shapes[key] for key in keys}, dtype)
        else:
            numbers = {key: random_tensor(key, shapes[key], seed) for key in keys}
            write_shard(directory / shard, {key: _encoded(array, dtype) for key, array in numbers.items()})
        weight_map.update(dict.fromkeys(keys, shard))
    total_bytes = DTYPE_BYTES[dtype] * sum(map(prod, shapes.values()))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    return total_bytes


def _split(shapes: Mapping[str, Shape], num_shards: int) -> list[list[str]]:
    """The keys of each shard, cut where a share of the numbers is full; sorted, as the hub's shards are."""
    shards: list[list[str]] = [[] for _ in range(num_shards)]
    total = sum(map(prod, shapes.values()))
    position = 0
    for key, shape in shapes.items():
        shards[min(position * num_shards // total, num_shards - 1)].append(key)
        position += prod(shape)
    return [sorted(keys) for keys in shards]


def write_shard(path: Path, tensors: Mapping[str, Array]) -> None:
    """One safetensors file, laid out in the order given: float32, or bfloat16 of arrays that hold its bits (uint16)."""
    arrays = {
        name: np.asarray(array, dtype="<u2" if array.dtype == np.uint16 else "<f4") for name, array in tensors.items()
    }
    header, _ = _header({name: (ARRAY_DTYPES[array.dtype], array.shape) for name, array in arrays.items()}, {})
    with path.open("wb") as file:
        file.write(header)
        for array in arrays.values():
            file.write(array.tobytes())


def _write_headers(path: Path, shapes: Mapping[str, Shape], dtype: str) -> None:
    """The file ``write_shard`` would write, but a hole where the data would be, and a mark that says so."""
    header, data_bytes = _header({name: (dtype, shape) for name, shape in shapes.items()}, HEADERS_ONLY)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + data_bytes)


def _header(tensors: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """A shard up to its data, and how many bytes of data follow."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + DTYPE_BYTES[dtype] * prod(shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    return len(text).to_bytes(8, "little") + text, position


def _encoded(array: Array, dtype: str) -> Array:
    """float32 numbers in ``dtype``; bfloat16 as its bits, rounded to nearest, ties to even. Finite numbers only."""
    match dtype:
        case "F32":
            return array
        case "BF16":
            bits = array.view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        case _:
            raise UsageError(f"cannot write weights as {TORCH_NAMES[dtype]}: not supported; use float32 or bfloat16")


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
