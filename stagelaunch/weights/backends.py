"""Other packages that read safetensors files, for whoever prefers one. None is required, each is imported when asked.

They bring bytes their own way, and their own faults: safetensors maps the files, so one that shrinks while it is read
kills the process (SIGBUS), which the supervisor reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from stagelaunch.core.errors import StageError
from stagelaunch.core.reading import Backend
from stagelaunch.devices.upload import Uploader
from stagelaunch.weights.files import fault
from stagelaunch.weights.plan import ReadItem, WeightPlan


def require_installed(backend: Backend) -> Any:
    """The package of a backend; None for our own readers. StageError when it cannot be imported."""
    if backend.module is None:
        return None
    try:
        return import_module(backend.module)
    except ImportError as error:
        raise StageError(
            f"cannot read weights with {backend}: {error}; pip install {backend.module}, "
            f"or set the stage's weights.backend to auto"
        ) from error


def fill(
    backend: Backend,
    plan: WeightPlan,
    flat: Mapping[str, torch.Tensor],
    uploader: Uploader,
    advance: Callable[[int], None],
) -> None:
    """Bring every item of ``plan`` to its place in ``flat`` (uint8), one tensor after the other.

    Raises StageError when the package is not there, CheckpointError when it cannot read a file, or did not bring all.
    """
    package = require_installed(backend)
    tensors = _by_safetensors if backend is Backend.SAFETENSORS else _by_instanttensor
    left = {(item.shard, item.name): item for item in plan.items}
    device = next(iter(flat.values())).device
    for item, tensor in tensors(package, left, device):
        target = flat[item.target][item.target_offset : item.target_offset + item.num_bytes]
        if tensor.nbytes != item.num_bytes:
            raise fault(item.shard, f"{item.name} has {tensor.nbytes:,} bytes by {backend}, {item.num_bytes:,} by us")
        uploader.copy(target, tensor.contiguous().view(-1).view(torch.uint8))
        # Before the next one: it may lie in the same memory.
        uploader.mark().wait()
        del left[item.shard, item.name]
        advance(item.num_bytes)
    if left:
        shard, name = next(iter(left))
        raise fault(shard, f"{len(left)} tensors were not brought by {backend}, {name} among them")


Wanted = Mapping[tuple[Path, str], ReadItem]


def _by_safetensors(package: Any, wanted: Wanted, device: torch.device) -> Iterator[tuple[ReadItem, torch.Tensor]]:
    for shard in dict.fromkeys(shard for shard, _ in wanted):
        items = [item for (path, _), item in wanted.items() if path == shard]
        try:
            with package.safe_open(str(shard), framework="pt", device="cpu") as file:
                for item in items:
                    yield item, file.get_tensor(item.name)
        except (OSError, package.SafetensorError) as error:
            raise fault(shard, f"cannot be read by safetensors: {error}; check the disk") from error


def _by_instanttensor(package: Any, wanted: Wanted, device: torch.device) -> Iterator[tuple[ReadItem, torch.Tensor]]:
    """Brings whole files, also what other stages need of them; nearly all of it must be this stage's to pay."""
    for shard in dict.fromkeys(shard for shard, _ in wanted):
        try:
            with package.safe_open([str(shard)], framework="pt", device=device) as file:
                for name, tensor in file.tensors():
                    if (item := wanted.get((shard, name))) is not None:
                        yield item, tensor
        except (OSError, ValueError) as error:
            raise fault(shard, f"cannot be read by instanttensor: {error}; check the disk") from error
