"""What a stage will need, said before it boots: the question and the answer, as plain data and as JSON.

Asked by ``supervisor.forecast``, answered by ``worker.forecast`` in a process of its own. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stagelaunch.core.engine_spec import EngineSpec, spec_from_json, spec_to_json
from stagelaunch.core.ledger import KVLayout


@dataclass(frozen=True)
class StageNeed:
    """What a stage takes whatever its budget is. In bytes; context, non-torch growth and margin are not in it."""

    weights_bytes: int
    """Parameters and buffers, in whole segments of the allocator."""
    activations_bytes: int
    """Peak of the largest batch, above what is resident."""
    graphs_bytes: int
    """Estimate from trial captures."""
    layout: KVLayout | None
    """Shape of the KV cache; None for a stage without one."""

    @property
    def total_bytes(self) -> int:
        """Weights, activations and graphs together."""
        return self.weights_bytes + self.activations_bytes + self.graphs_bytes


@dataclass(frozen=True)
class NeedRequest:
    """A stage whose need is asked for: its engine, and what the engine is to build."""

    stage_id: int
    engine: str
    spec: EngineSpec
    env: Mapping[str, str] = field(default_factory=dict)
    """Set while the stage is forecast."""


@dataclass(frozen=True)
class Needs:
    """The answers by stage id: every stage asked for is in exactly one of the two."""

    found: Mapping[int, StageNeed]
    errors: Mapping[int, str]
    """Why a stage has no forecast."""


NO_NEEDS = Needs({}, {})
"""Nothing was asked."""


def need_to_json(need: StageNeed) -> dict[str, Any]:
    """Plain JSON of a need."""
    return asdict(need)


def need_from_json(body: Mapping[str, Any]) -> StageNeed:
    """Inverse of ``need_to_json``. KeyError, TypeError or ValueError for anything else, impossible sizes included."""
    layout = body["layout"]
    sizes = {name: _count(body[name], 0) for name in ("weights_bytes", "activations_bytes", "graphs_bytes")}
    if layout is not None:
        layout = KVLayout(**{name: _count(value, 1) for name, value in layout.items()})
    return StageNeed(**sizes, layout=layout)


def _count(value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise ValueError(f"{value!r} is no size")
    return value


def request_to_json(request: NeedRequest) -> dict[str, Any]:
    """Plain JSON of a request."""
    return {**request.__dict__, "spec": spec_to_json(request.spec), "env": dict(request.env)}


def request_from_json(body: Mapping[str, Any]) -> NeedRequest:
    """Inverse of ``request_to_json``. KeyError or TypeError for anything else."""
    return NeedRequest(**{**body, "spec": spec_from_json(body["spec"])})
