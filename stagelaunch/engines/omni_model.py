"""The one adapter to transformers' Qwen3-Omni: builds a component without weights and gives it a small neutral surface.

Nothing else in the project touches transformers' module tree, which moves between minors: one minor is accepted.
Decoder layers are composed here (embed, rotary, layers, norm, head) instead of calling the decorated model forwards,
whose masks and caches sync with the host. Importing this module imports transformers (6-7 s).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import transformers
from torch import nn

from stagelaunch.core.errors import StageError
from stagelaunch.devices.base import Device
from stagelaunch.engines.paged import CausalPrefill
from stagelaunch.engines.versions import TRANSFORMERS_MINOR


def check_version(version: str) -> None:
    """StageError unless ``version`` of transformers is of the one minor this adapter was written for."""
    if version.split(".")[:2] != TRANSFORMERS_MINOR.split("."):
        raise StageError(
            f"cannot use transformers {version}: its Qwen3-Omni module tree differs between minors and this release "
            f"knows {TRANSFORMERS_MINOR}; pip install 'transformers~={TRANSFORMERS_MINOR}.0'"
        )


check_version(transformers.__version__)

# Only now: another minor may lack these names, and the version is what its user must hear about.
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling  # noqa: E402
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig  # noqa: E402

ATTENTION = "stagelaunch_paged"

COMPONENTS: Mapping[str, tuple[str, Any]] = {
    "thinker": ("thinker_config", modeling.Qwen3OmniMoeThinkerForConditionalGeneration),
    "talker": ("talker_config", modeling.Qwen3OmniMoeTalkerForConditionalGeneration),
    "code2wav": ("code2wav_config", modeling.Qwen3OmniMoeCode2Wav),
}
"""Component -> (its part of config.json, the class that implements it)."""

ROTARY = (
    modeling.Qwen3OmniMoeThinkerTextRotaryEmbedding,
    modeling.Qwen3OmniMoeRotaryEmbedding,
    modeling.Qwen3OmniMoeVisionRotaryEmbedding,
)


class AttentionState(Protocol):
    """Where a layer's attention looks: the batch itself, or a paged cache. Travels in the layers' kwargs."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] (key, value: kv_heads) to [batch, tokens, heads, head_dim]."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    attention_state: AttentionState,
    **_unused: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature over ``attention_state``; returns (output, no attention weights)."""
    return attention_state.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)


class OmniModel:
    """A component's module: on meta when built, then materialised on a device, then filled by the reader."""

    def __init__(self, component: str, module: Any) -> None:
        self.component = component
        self.module = module
        self.thin = False
        """Leave out work whose memory other work shows; for tensors without data."""

    def materialise(
        self, targets: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: Device
    ) -> dict[str, torch.Tensor]:
        """Give every parameter and buffer memory on ``device``; the unfilled parameters by state-dict name.

        ``targets`` (name -> shape, dtype) must be the module's own state dict, name for name and shape for shape.
        Buffers that no checkpoint holds are computed here, as transformers computes them. StageError otherwise.
        """
        self._check_targets(targets)
        self.thin = not device.holds_data
        filled: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in targets.items():
            filled[name] = device.empty(shape, dtype)
            _assign(self.module, name, filled[name])
        for prefix, owner in self.module.named_modules():
            for name, value in _computed_buffers(owner).items():
                resident = device.empty(tuple(value.shape), value.dtype)
                device.copy_from_host(resident, value)
                _assign(self.module, f"{prefix}.{name}" if prefix else name, resident)
        self._check_nothing_left_on_meta()
        self.module.requires_grad_(False).eval()
        return filled

    def _check_targets(self, targets: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        own = {name: tuple(tensor.shape) for name, tensor in self.module.state_dict().items()}
        wrong = sorted(own.keys() ^ targets.keys())
        wrong += sorted(name for name in own.keys() & targets.keys() if own[name] != tuple(targets[name][0]))
        if wrong:
            shown = ", ".join(
                f"{name} (model {own.get(name, 'has none')}, checkpoint {targets.get(name, ('has none',))[0]})"
                for name in wrong[:5]
            )
            raise StageError(
                f"cannot build {self.component}: {len(wrong)} tensors of the checkpoint differ from the model: {shown}"
                "; take config.json and the weights from one checkpoint"
            )

    def _check_nothing_left_on_meta(self) -> None:
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        left = [name for name, tensor in tensors if tensor.is_meta]
        if left:
            raise StageError(
                f"cannot build {self.component}: {len(left)} tensors have no memory: {', '.join(left[:5])}; "
                f"this is a bug, or transformers is not {TRANSFORMERS_MINOR}"
            )


class LanguageModel(OmniModel):
    """Thinker or talker: token ids in, logits out, attention through an AttentionState."""

    def __init__(self, component: str, module: Any) -> None:
        super().__init__(component, module)
        is_thinker = component == "thinker"
        self._text = module.model.language_model if is_thinker else module.model
        self._embedding = self._text.embed_tokens if is_thinker else self._text.codec_embedding
        self._head = module.lm_head if is_thinker else module.codec_head
        self.vocab_size: int = self._head.out_features

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] to [..., hidden]."""
        embedded: torch.Tensor = self._embedding(token_ids)
        return embedded

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionState
    ) -> torch.Tensor:
        """[batch, tokens] ids and positions to [batch, tokens, hidden] after the final norm."""
        return _run_layers(self._text, self.embed(token_ids), positions, attention, thin=self.thin)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to [..., vocab]."""
        logits: torch.Tensor = self._head(hidden)
        return logits

    def outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a step yields from the hidden state of each row's last token, [batch, hidden]: (logits,)."""
        return (self.logits(hidden),)


class TalkerModel(LanguageModel):
    """The talker, with the code predictor that draws the residual codes of each of its tokens."""

    def __init__(self, component: str, module: Any) -> None:
        super().__init__(component, module)
        predictor = module.code_predictor
        self._predictor, self._predictor_heads = predictor.model, predictor.lm_head
        self.num_code_groups: int = len(predictor.lm_head) + 1

    def outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(logits [batch, vocab], codes [batch, num_code_groups]); the first code is the likeliest token."""
        logits = self.logits(hidden)
        return logits, self.predict_codes(hidden, logits.argmax(-1))

    def predict_codes(self, hidden: torch.Tensor, first_codes: torch.Tensor) -> torch.Tensor:
        """All codes of one frame per row, greedily: [batch, hidden] and [batch] to [batch, num_code_groups].

        The sequence (hidden state, first code, residual codes) is short: it is run anew for each code, which spares
        a second cache.
        """
        codes = [first_codes]
        embeds = [hidden, self.embed(first_codes)]
        for group, head in enumerate(self._predictor_heads):
            if self.thin and group < len(self._predictor_heads) - 2:
                # Its sequence is shorter than the last ones', and takes less.
                codes.append(first_codes.clone())
                embeds.append(self._predictor.codec_embedding[group](codes[-1]))
                continue
            sequence = torch.stack(embeds, dim=1)
            positions = torch.arange(sequence.shape[1], device=sequence.device)[None]
            states = _run_layers(self._predictor, sequence, positions, CausalPrefill(), thin=self.thin)
            codes.append(head(states[:, -1]).argmax(-1))
            embeds.append(self._predictor.codec_embedding[group](codes[-1]))
        return torch.stack(codes, dim=1)


class Code2WavModel(OmniModel):
    """The vocoder: frames of codes in, waveform out. No cache: its attention window is a few frames."""

    def __init__(self, component: str, module: Any) -> None:
        super().__init__(component, module)
        self.num_quantizers: int = module.config.num_quantizers
        self.codebook_size: int = module.config.codebook_size

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """[batch, num_quantizers, frames] to [batch, 1, samples], each sample in [-1, 1]."""
        transformer = self.module.pre_transformer
        hidden = self.module.code_embedding(codes + self.module.code_offset).mean(1)
        frames = torch.arange(hidden.shape[1], device=hidden.device)
        age = frames[:, None] - frames[None, :]
        # transformers' own mask builder looks at values on the host; this is the mask it builds.
        window = ((age >= 0) & (age < transformer.config.sliding_window))[None, None]
        rotary = transformer.rotary_emb(hidden, frames[None])
        for layer in transformer.layers:
            hidden = layer(hidden, attention_mask=window, position_embeddings=rotary)
        wav = transformer.norm(hidden).permute(0, 2, 1)
        for block in (*(block for blocks in self.module.upsample for block in blocks), *self.module.decoder):
            wav = block(wav)
        return torch.clamp(wav, -1, 1)


def build(component: str, config: Mapping[str, Any], experts: str = "grouped_mm") -> OmniModel:
    """The component's model on meta, from the content of ``config.json``.

    ``experts`` is transformers' experts_implementation: grouped_mm can be captured; eager cannot, batched_mm gathers
    the weights of every token. StageError when the config does not describe such a component.
    """
    if component not in COMPONENTS:
        raise StageError(f"cannot build component {component!r}: unknown; name one of {', '.join(COMPONENTS)}")
    config_name, module_class = COMPONENTS[component]
    try:
        component_config = _parse_config(config, config_name)
        component_config._experts_implementation = experts
        if component == "thinker":
            component_config.text_config._attn_implementation = ATTENTION
        elif component == "talker":
            component_config._attn_implementation = ATTENTION
        else:
            component_config._attn_implementation = "sdpa"
        with torch.device("meta"):
            module = module_class(component_config)
    except Exception as error:
        raise StageError(
            f"cannot build {component} from config.json: {type(error).__name__}: {error}; "
            f"take the config of a complete Qwen3-Omni checkpoint (its part is {config_name})"
        ) from error
    surface = {"thinker": LanguageModel, "talker": TalkerModel, "code2wav": Code2WavModel}[component]
    return surface(component, module)


def _parse_config(config: Mapping[str, Any], name: str) -> Any:
    """The part called ``name`` of transformers' own config object."""
    verbosity = transformers.logging.get_verbosity()
    # It warns about two rope keys that it reads all the same, for the published checkpoint too.
    transformers.logging.set_verbosity_error()
    try:
        return getattr(Qwen3OmniMoeConfig.from_dict(dict(config)), name)
    finally:
        transformers.logging.set_verbosity(verbosity)


def _run_layers(
    stack: Any, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionState, *, thin: bool
) -> torch.Tensor:
    """Decoder layers and final norm over [batch, tokens, hidden]; positions [batch or 1, tokens]."""
    rotary = stack.rotary_emb(hidden, positions)
    for layer in _representatives(stack.layers) if thin else stack.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, attention_state=attention)
    normed: torch.Tensor = stack.norm(hidden)
    return normed


def _representatives(layers: Iterable[Any]) -> list[Any]:
    """The first two layers of each kind: nothing of a layer but its result outlives it, so two take what all take."""
    seen: Counter[type] = Counter()
    chosen = []
    for layer in layers:
        seen[type(layer.mlp)] += 1
        if seen[type(layer.mlp)] <= 2:
            chosen.append(layer)
    return chosen


def _computed_buffers(owner: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of ``owner`` that no checkpoint holds, computed on the host exactly as its constructor does."""
    if isinstance(owner, ROTARY):
        return dict(type(owner)(owner.config).named_buffers())
    if isinstance(owner, modeling.SinusoidsPositionEmbedding):
        return {"positional_embedding": owner.compute_default_singular_positional_embedding()}
    if isinstance(owner, modeling.Qwen3OmniMoeCode2Wav):
        config = owner.config
        return {"code_offset": torch.arange(config.num_quantizers).view(1, -1, 1) * config.codebook_size}
    return {}


def _assign(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put ``tensor`` in the place of the parameter or buffer called ``name``."""
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
