"""The protocol between a worker and the model it boots, and how an engine is found by name.

The worker walks the phases, holds the locks and measures; an engine only does what it is told, on the device it is
given. Engine authors implement ``Engine`` and name it in the config as ``engine: package.module:ClassName``;
``docs/engine.md`` says how, ``configs/own_engine.py`` is a whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.errors import EngineNotFoundError
from stagelaunch.core.ledger import KVLayout

if TYPE_CHECKING:
    # Not needed to find an engine, and it imports torch: an engine without torch need not wait for it.
    from stagelaunch.devices.base import Device

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

__all__ = ["BUILT_IN", "Engine", "EngineSpec", "ProbeResult", "Progress", "create_engine"]

BUILT_IN = {"qwen3-omni": "stagelaunch.engines.torch_omni:TorchOmniEngine"}


@dataclass(frozen=True)
class ProbeResult:
    """One step through the graph, compared with the same step run eagerly."""

    batch_size: int
    through_graph: bool
    max_abs_diff: float
    output_shape: tuple[int, ...]
    elapsed_s: float

    @property
    def matches(self) -> bool:
        """The graph gives what eager gives."""
        return self.max_abs_diff == 0.0


class Engine(Protocol):
    """One stage's model. Methods are called in this order, from one thread, each at most as noted.

    A class attribute ``preload`` may name modules to import before stages are forked. They, and the engine's own, must
    start no thread and touch no device then.
    """

    def import_libraries(self) -> None:
        """Import what the model needs. Touches no device."""

    def allocate_weights(self, device: Device) -> None:
        """Build the model and allocate its parameters and buffers on ``device``, unfilled."""

    def read_weights(self, progress: Progress) -> None:
        """Fill what was allocated. Allocates no device memory. Every parameter is filled, or it raises."""

    def run_largest_batch(self) -> None:
        """One forward of the largest batch the stage may ever see. May be called several times."""

    @property
    def kv_layout(self) -> KVLayout | None:
        """Shape of the KV cache; None for a stage without one."""

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate a KV cache of ``num_blocks`` blocks, null block included."""

    def release_kv(self) -> None:
        """Drop the KV cache."""

    def capture(self, size: int) -> None:
        """Capture the step of batch size ``size``. Called largest first."""

    def release_graphs(self) -> None:
        """Drop every captured graph and their pool."""

    def probe(self) -> ProbeResult:
        """One step of a stage that is ready, through its graph when it has one, compared with eager."""

    def close(self) -> None:
        """Drop everything that lives on the device. Idempotent."""


def import_engine(name: str) -> Callable[[EngineSpec], Engine]:
    """The class called ``name``, with the modules its ``preload`` names imported: what stages share by being forked.

    EngineNotFoundError when it is not there, or what it imports is not. What else goes wrong in an import passes
    through: that is the engine's own, and its traceback tells more.
    """
    module_name, _, class_name = BUILT_IN.get(name, name).partition(":")
    try:
        module = import_module(module_name)
        factory = getattr(module, class_name, None)
        for preload in getattr(factory, "preload", ()):
            import_module(preload)
    except ModuleNotFoundError as error:
        raise EngineNotFoundError(f"cannot load engine {name!r}: {_missing(name, module_name, error)}") from error
    if not callable(factory):
        where = getattr(module, "__file__", None) or "built in"
        raise EngineNotFoundError(
            f"cannot load engine {name!r}: module {module_name} ({where}) has no class {class_name}; "
            f"name a class that it has, as package.module:ClassName"
        )
    return cast(Callable[[EngineSpec], Engine], factory)


def _missing(name: str, module_name: str, error: ModuleNotFoundError) -> str:
    """Whether the engine itself is not there, or something that it needs."""
    if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
        return (
            f"{error}; put the directory it is in on PYTHONPATH (that of the config file is not searched), or install "
            "it into this environment"
        )
    what = "pip install 'stagelaunch[torch]'" if name in BUILT_IN else "install that"
    return f"what it imports is not there: {error}; {what} into this environment"


def create_engine(name: str, spec: EngineSpec) -> Engine:
    """The engine called ``name``: a built-in one, or ``package.module:ClassName``. Raises as ``import_engine`` does."""
    return import_engine(name)(spec)
