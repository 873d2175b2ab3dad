"""What a Qwen3-Omni checkpoint must hold, from its config.json alone: the hub's tensor names and shapes.

Pure. The names are those of the hub, with one tensor per expert; ``plan`` maps them to transformers' modules. A key
that config.json lacks counts as the class default of transformers 5.24, as it does when transformers builds the
module; the test compares the two key by key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stagelaunch.core.errors import CheckpointError, Fault
from stagelaunch.core.ledger import KVLayout
from stagelaunch.weights.config_values import MAX_EXPERTS, MAX_LAYERS, Section

COMPONENTS = ("thinker", "talker", "code2wav")
DTYPES = ("float32", "bfloat16", "float16")

Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]


@dataclass(frozen=True)
class _Decoder:
    """The numbers all four decoders (thinker, talker, code predictor, code2wav's transformer) are made of."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_bias: bool
    vocab: int


_THINKER_TEXT = {"layers": 28, "hidden": 2048, "intermediate": 18944, "heads": 28, "kv_heads": 4, "vocab": 3584}
_TALKER_TEXT = {"layers": 20, "hidden": 1024, "intermediate": 2048, "heads": 16, "kv_heads": 2, "vocab": 3072}
_CODE_PREDICTOR = {
    "layers": 5, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab": 2048
}  # fmt: skip
_CODE2WAV = {"layers": 8, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 16, "vocab": 2048}


def _decoder(section: Section, defaults: dict[str, int], vocab_key: str = "vocab_size") -> _Decoder:
    hidden = section.number("hidden_size", defaults["hidden"])
    faults_before = len(section.faults)
    heads = section.number("num_attention_heads", defaults["heads"])
    kv_heads = section.number("num_key_value_heads", defaults["kv_heads"])
    if heads % kv_heads and len(section.faults) == faults_before:
        section.fault(
            "num_key_value_heads", f"is {kv_heads}, which does not divide {heads} attention heads; correct it"
        )
    return _Decoder(
        layers=section.number("num_hidden_layers", defaults["layers"], at_most=MAX_LAYERS),
        hidden=hidden,
        intermediate=section.number("intermediate_size", defaults["intermediate"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=section.number("head_dim", defaults.get("head_dim", max(hidden // heads, 1))),
        attention_bias=section.flag("attention_bias", False),
        vocab=section.number(vocab_key, defaults["vocab"]),
    )


def _root(config: dict[str, Any], component: str) -> Section:
    if component not in COMPONENTS:
        raise ValueError(f"no component {component!r}; there are {', '.join(COMPONENTS)}")
    root = Section(config, "", [])
    if component != "thinker" and not root.flag("enable_audio_output", True):
        root.fault(
            "enable_audio_output", f"is false: this model has no {component}; drop the stage or use a model that speaks"
        )
    return root


def expected_tensors(config: dict[str, Any], component: str) -> dict[str, Shape]:
    """Hub key -> shape of every tensor the checkpoint must hold for ``component``, in the order of its modules.

    Raises CheckpointError naming every value of config.json no model can be built from.
    """
    root = _root(config, component)
    section = root.section(f"{component}_config")
    build = {"thinker": _thinker, "talker": _talker, "code2wav": _code2wav}[component]
    tensors = {f"{component}.{name}": shape for name, shape in build(section)}
    root.raise_faults()
    return tensors


def kv_layout(config: dict[str, Any], component: str, block_size: int, dtype_bytes: int) -> KVLayout | None:
    """Shape of the component's paged KV cache; None for code2wav, which attends over a window of its own chunk."""
    root = _root(config, component)
    if component == "code2wav":
        return None
    defaults = {"thinker": _THINKER_TEXT, "talker": _TALKER_TEXT}[component]
    decoder = _decoder(root.section(f"{component}_config").section("text_config"), defaults)
    root.raise_faults()
    return KVLayout(decoder.layers, decoder.kv_heads, decoder.head_dim, dtype_bytes, block_size)


def component_dtype(config: dict[str, Any]) -> str:
    """The dtype config.json says its tensors have. CheckpointError if it says none we can run."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    value = config.get(key)
    if isinstance(value, str) and value in DTYPES:
        return value
    text = f"is {value!r:.80}, not one of {', '.join(DTYPES)}; correct it, or set the stage's dtype"
    raise CheckpointError((Fault("config.json", None, key, text),))


def _linear(name: str, out_dim: int, in_dim: int, *, bias: bool = True) -> Tensors:
    yield f"{name}.weight", (out_dim, in_dim)
    if bias:
        yield f"{name}.bias", (out_dim,)


def _layer_norm(name: str, dim: int) -> Tensors:
    yield f"{name}.weight", (dim,)
    yield f"{name}.bias", (dim,)


def _conv(name: str, *weight: int, bias: int) -> Tensors:
    yield f"{name}.weight", weight
    yield f"{name}.bias", (bias,)


def _attention(prefix: str, d: _Decoder, *, qk_norm: bool) -> Tensors:
    for name, heads in (("q_proj", d.heads), ("k_proj", d.kv_heads), ("v_proj", d.kv_heads)):
        yield from _linear(f"{prefix}.{name}", heads * d.head_dim, d.hidden, bias=d.attention_bias)
    yield from _linear(f"{prefix}.o_proj", d.hidden, d.heads * d.head_dim, bias=d.attention_bias)
    if qk_norm:
        yield f"{prefix}.q_norm.weight", (d.head_dim,)
        yield f"{prefix}.k_norm.weight", (d.head_dim,)


def _mlp(prefix: str, hidden: int, intermediate: int) -> Tensors:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)


def _layer_norms(prefix: str, hidden: int) -> Tensors:
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def _experts(prefix: str, hidden: int, intermediate: int, num_experts: int) -> Tensors:
    yield f"{prefix}.gate.weight", (num_experts, hidden)
    for expert in range(num_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, intermediate)


def _thinker(section: Section) -> Tensors:
    section.refuse_tied()
    text = section.section("text_config")
    d = _decoder(text, _THINKER_TEXT)
    yield from _audio_tower(section.section("audio_config"))
    yield from _visual(section.section("vision_config"))
    yield "model.embed_tokens.weight", (d.vocab, d.hidden)
    num_experts = text.number("num_experts", 128, at_least=0, at_most=MAX_EXPERTS)
    moe_intermediate = text.number("moe_intermediate_size", 768)
    sparse_step = text.number("decoder_sparse_step", 1)
    dense_layers = text.numbers("mlp_only_layers", (), at_least=0)
    for layer in range(d.layers):
        prefix = f"model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn", d, qk_norm=True)
        if layer not in dense_layers and num_experts > 0 and (layer + 1) % sparse_step == 0:
            yield from _experts(f"{prefix}.mlp", d.hidden, moe_intermediate, num_experts)
        else:
            yield from _mlp(f"{prefix}.mlp", d.hidden, d.intermediate)
        yield from _layer_norms(prefix, d.hidden)
    yield "model.norm.weight", (d.hidden,)
    yield "lm_head.weight", (d.vocab, d.hidden)


def _audio_tower(section: Section) -> Tensors:
    layers = section.number("encoder_layers", 32, alias="num_hidden_layers", at_most=MAX_LAYERS)
    ffn = section.number("encoder_ffn_dim", 5120, alias="intermediate_size")
    dim = section.number("d_model", 1280, alias="hidden_size")
    channels = section.number("downsample_hidden_size", 480)
    mel_bins = section.number("num_mel_bins", 128)
    for layer in range(layers):
        prefix = f"audio_tower.layers.{layer}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _linear(f"{prefix}.self_attn.{name}", dim, dim)
        yield from _layer_norm(f"{prefix}.self_attn_layer_norm", dim)
        yield from _linear(f"{prefix}.fc1", ffn, dim)
        yield from _linear(f"{prefix}.fc2", dim, ffn)
        yield from _layer_norm(f"{prefix}.final_layer_norm", dim)
    yield from _layer_norm("audio_tower.ln_post", dim)
    yield from _conv("audio_tower.conv2d1", channels, 1, 3, 3, bias=channels)
    yield from _conv("audio_tower.conv2d2", channels, channels, 3, 3, bias=channels)
    yield from _conv("audio_tower.conv2d3", channels, channels, 3, 3, bias=channels)
    reduced_bins = (((mel_bins + 1) // 2 + 1) // 2 + 1) // 2  # three convolutions of stride 2
    yield from _linear("audio_tower.conv_out", dim, channels * reduced_bins, bias=False)
    yield from _linear("audio_tower.proj1", dim, dim)
    yield from _linear("audio_tower.proj2", section.number("output_dim", 3584), dim)


def _visual(section: Section) -> Tensors:
    dim = section.number("hidden_size", 1152)
    intermediate = section.number("intermediate_size", 4304)
    patch = section.number("patch_size", 16)
    temporal = section.number("temporal_patch_size", 2)
    yield from _conv("visual.patch_embed.proj", dim, section.number("in_channels", 3), temporal, patch, patch, bias=dim)
    yield "visual.pos_embed.weight", (section.number("num_position_embeddings", 2304), dim)
    for block in range(section.number("depth", 27, alias="num_hidden_layers", at_most=MAX_LAYERS)):
        prefix = f"visual.blocks.{block}"
        yield from _layer_norm(f"{prefix}.norm1", dim)
        yield from _layer_norm(f"{prefix}.norm2", dim)
        yield from _linear(f"{prefix}.attn.qkv", 3 * dim, dim)
        yield from _linear(f"{prefix}.attn.proj", dim, dim)
        yield from _linear(f"{prefix}.mlp.linear_fc1", intermediate, dim)
        yield from _linear(f"{prefix}.mlp.linear_fc2", dim, intermediate)
    merged = dim * section.number("spatial_merge_size", 2) ** 2
    out_dim = section.number("out_hidden_size", 3584)
    deepstack = section.numbers("deepstack_visual_indexes", (8, 16, 24), at_least=0)
    mergers = [("visual.merger", dim)] + [(f"visual.merger_list.{i}", merged) for i in range(len(deepstack))]
    for prefix, norm_dim in mergers:
        yield from _layer_norm(f"{prefix}.ln_q", norm_dim)
        yield from _linear(f"{prefix}.mlp.0", merged, merged)
        yield from _linear(f"{prefix}.mlp.2", out_dim, merged)


def _talker(section: Section) -> Tensors:
    section.refuse_tied()
    section.number("spatial_merge_size", None)  # no shape depends on it, but no talker can be built without it
    text = section.section("text_config")
    d = _decoder(text, _TALKER_TEXT)
    num_experts = text.number("num_experts", 128, alias="num_local_experts", at_most=MAX_EXPERTS)
    moe_intermediate = text.number("moe_intermediate_size", 384)
    shared_intermediate = text.number("shared_expert_intermediate_size", None)
    thinker_hidden = section.number("thinker_hidden_size", 2048)
    yield "model.codec_embedding.weight", (d.vocab, d.hidden)
    for layer in range(d.layers):
        prefix = f"model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn", d, qk_norm=True)
        yield from _experts(f"{prefix}.mlp", d.hidden, moe_intermediate, num_experts)
        yield from _mlp(f"{prefix}.mlp.shared_expert", d.hidden, shared_intermediate)
        yield f"{prefix}.mlp.shared_expert_gate.weight", (1, d.hidden)
        yield from _layer_norms(prefix, d.hidden)
    yield "model.norm.weight", (d.hidden,)
    for name in ("text_projection", "hidden_projection"):
        yield from _linear(f"{name}.linear_fc1", d.intermediate, thinker_hidden)
        yield from _linear(f"{name}.linear_fc2", d.hidden, d.intermediate)
    yield "codec_head.weight", (d.vocab, d.hidden)
    yield from _code_predictor(section.section("code_predictor_config"))


def _code_predictor(section: Section) -> Tensors:
    d = _decoder(section, _CODE_PREDICTOR)
    groups = section.number("num_code_groups", 32, at_least=2, at_most=MAX_LAYERS)
    for layer in range(d.layers):
        prefix = f"code_predictor.model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn", d, qk_norm=True)
        yield from _mlp(f"{prefix}.mlp", d.hidden, d.intermediate)
        yield from _layer_norms(prefix, d.hidden)
    yield "code_predictor.model.norm.weight", (d.hidden,)
    for group in range(groups - 1):  # the first group is the talker's own
        yield f"code_predictor.model.codec_embedding.{group}.weight", (d.vocab, d.hidden)
        yield f"code_predictor.lm_head.{group}.weight", (d.vocab, d.hidden)


def _code2wav(section: Section) -> Tensors:
    d = _decoder(section, _CODE2WAV, vocab_key="codebook_size")
    for layer in range(d.layers):
        prefix = f"pre_transformer.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn", d, qk_norm=False)
        yield from _mlp(f"{prefix}.mlp", d.hidden, d.intermediate)
        yield from _layer_norms(prefix, d.hidden)
        yield f"{prefix}.self_attn_layer_scale.scale", (d.hidden,)
        yield f"{prefix}.mlp_layer_scale.scale", (d.hidden,)
    yield "pre_transformer.norm.weight", (d.hidden,)
    yield "code_embedding.weight", (d.vocab * section.number("num_quantizers", 16), d.hidden)
    for stage, factor in enumerate(section.numbers("upsampling_ratios", (2, 2))):
        yield from _conv(f"upsample.{stage}.0.conv", d.hidden, d.hidden, factor, bias=d.hidden)
        yield from _convnext(f"upsample.{stage}.1", d.hidden)
    yield from _code2wav_decoder(section, d.hidden)


def _convnext(prefix: str, dim: int) -> Tensors:
    yield f"{prefix}.gamma", (dim,)
    yield from _conv(f"{prefix}.dwconv.conv", dim, 1, 7, bias=dim)
    yield from _layer_norm(f"{prefix}.norm", dim)
    yield from _linear(f"{prefix}.pwconv1", 4 * dim, dim)
    yield from _linear(f"{prefix}.pwconv2", dim, 4 * dim)


def _snake(prefix: str, dim: int) -> Tensors:
    yield f"{prefix}.alpha", (dim,)
    yield f"{prefix}.beta", (dim,)


def _code2wav_decoder(section: Section, hidden: int) -> Tensors:
    dim = section.number("decoder_dim", 1536)
    rates = section.numbers("upsample_rates", (8, 5, 4, 3))
    if dim >> len(rates) < 1:
        section.fault("decoder_dim", f"is {dim}, too small to be halved {len(rates)} times; correct it")
    yield from _conv("decoder.0.conv", dim, hidden, 7, bias=dim)
    for stage, rate in enumerate(rates):
        in_dim, out_dim = dim >> stage, dim >> (stage + 1)
        prefix = f"decoder.{stage + 1}.block"
        yield from _snake(f"{prefix}.0", in_dim)
        yield from _conv(f"{prefix}.1.conv", in_dim, out_dim, 2 * rate, bias=out_dim)
        for unit in (2, 3, 4):
            yield from _snake(f"{prefix}.{unit}.act1", out_dim)
            yield from _conv(f"{prefix}.{unit}.conv1.conv", out_dim, out_dim, 7, bias=out_dim)
            yield from _snake(f"{prefix}.{unit}.act2", out_dim)
            yield from _conv(f"{prefix}.{unit}.conv2.conv", out_dim, out_dim, 1, bias=out_dim)
    last = dim >> len(rates)
    yield from _snake(f"decoder.{len(rates) + 1}", last)
    yield from _conv(f"decoder.{len(rates) + 2}.conv", 1, last, 7, bias=1)
