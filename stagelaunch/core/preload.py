"""Which stages can be forked from one process that has imported their libraries, and whether it is fit for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagelaunch.core.run_spec import StageRun

READ_LATE = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
"""Read when the device is opened, not when a library is imported: may differ between stages of one forkserver."""
DRIVER_NODES = "/dev/nvidia"
"""What the driver's files begin with. Open where CUDA was initialised, which does not survive a fork."""

Environment = tuple[tuple[str, str], ...]
"""Variables with their values, sorted."""


@dataclass(frozen=True)
class Preload:
    """What one forkserver imports, and under which variables of its stages."""

    environment: Environment
    engines: tuple[str, ...] = ()
    backend: str = ""


def early_environment(run: StageRun) -> Environment:
    """What of the stage's environment its libraries may read while they are imported."""
    return tuple(sorted((name, value) for name, value in run.env.items() if name not in READ_LATE))


def preload_for(run: StageRun, runs: Iterable[StageRun]) -> Preload:
    """What is imported for ``run``: the engines of all stages that have its early environment."""
    early = early_environment(run)
    alike = [other for other in runs if early_environment(other) == early]
    return Preload(early, tuple(sorted({other.engine for other in alike})), run.backend)


def unfit(
    threads: int, open_files: Iterable[str], modules: Mapping[str, object], changed: Sequence[str] = ()
) -> str | None:
    """Why a process with these threads, open files and modules must not be forked; None when it may be.

    ``changed``: what imports have changed of the process itself, where they are those of several engines.
    """
    if threads != 1:
        # A lock that another thread holds at the fork is never released in the child.
        return f"what they import starts threads ({threads - 1})"
    if any(file.startswith(DRIVER_NODES) for file in open_files) or _is_initialised(modules.get("torch")):
        return "what they import opens the driver"
    if changed:
        # One engine's library would change it for the stages of the others.
        return f"what they import changes {' and '.join(changed)}"
    return None


def _is_initialised(torch: object) -> bool:
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())
