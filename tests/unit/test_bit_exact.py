"""Each component filled by our plan and reader is, bit for bit, the component of the whole model loaded at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stagelaunch.devices.upload import HostUploader
from stagelaunch.weights.index import CheckpointIndex, read_index
from stagelaunch.weights.omni_spec import COMPONENTS
from stagelaunch.weights.plan import WeightPlan, plan_component
from stagelaunch.weights.reader import fill

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path) -> Any:
    model_class = transformers.Qwen3OmniMoeForConditionalGeneration
    model, info = model_class.from_pretrained(tiny_checkpoint, dtype=torch.float32, output_loading_info=True)
    assert {name: keys for name, keys in info.items() if keys} == {}  # else it would be compared with random numbers
    return model


@pytest.fixture(scope="module")
def index(tiny_checkpoint: Path) -> CheckpointIndex:
    return read_index(tiny_checkpoint)


def skeleton(whole: Any, component: str) -> torch.nn.Module:
    part = getattr(whole, component)
    with torch.device("meta"):
        return type(part)._from_config(part.config)


def empty_targets(plan: WeightPlan) -> dict[str, torch.Tensor]:
    """NaN everywhere: a byte that is not written shows."""
    return {n: torch.full(spec.shape, torch.nan, dtype=getattr(torch, spec.dtype)) for n, spec in plan.targets.items()}


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("staged", [False, True])
def test_every_parameter_is_bit_exact(whole: Any, index: CheckpointIndex, component: str, staged: bool) -> None:
    plan = plan_component(index, component)
    tensors = empty_targets(plan)
    fill(plan, tensors, HostUploader() if staged else None, lambda done, total: None)
    module = skeleton(whole, component)
    module.load_state_dict(tensors, strict=True, assign=True)
    reference = getattr(whole, component).state_dict()
    filled = module.state_dict()
    assert filled.keys() == reference.keys()
    assert [name for name in reference if not torch.equal(filled[name], reference[name])] == []


@pytest.mark.parametrize("component", COMPONENTS)
def test_nothing_is_tied(whole: Any, component: str) -> None:
    """assign=True would untie tied weights: there must be none."""
    parameters = list(getattr(whole, component).parameters())
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)


def test_the_random_model_works(whole: Any) -> None:
    """Finite logits that depend on the input, nearly all experts in use, sound that is neither silent nor clipped."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4000, (1, 64), generator=generator)
    with torch.no_grad():
        out = whole.thinker(input_ids=tokens, use_cache=False, output_router_logits=True)
        wave = whole.code2wav(torch.randint(0, 1024, (1, 4, 20), generator=generator))
    assert out.logits.isfinite().all()
    assert 0.1 < out.logits.std() < 10
    assert len(set(out.logits[0].argmax(-1).tolist())) > 32
    for router in out.router_logits:
        assert len(set(router.topk(2).indices.flatten().tolist())) >= 6
    assert wave.isfinite().all()
    assert 1e-3 < wave.std() < 1
    assert (wave.abs() < 1).float().mean() > 0.99
