"""What everything that is measured of a stage rests on: two boots on equal grounds measure the same.

By name, so that it can be said what has changed. Not the device's UUID: another card of the same model, size and driver
gives the same figures, and a plan is checked against the boot that uses it. Cheap: of a checkpoint only its config and
index are read. Called by ``supervisor.run`` before anything is started; imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import stagelaunch
from stagelaunch.core.engine_spec import spec_to_json
from stagelaunch.core.inventory import DeviceInfo
from stagelaunch.core.run_spec import StageRun
from stagelaunch.system.process import boot_id
from stagelaunch.system.regular import read_regular
from stagelaunch.weights.index import CONFIG_NAME, INDEX_NAME

_LIBRARIES = ("torch", "transformers")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))
# fmt: off
_INHERITED = (
    "CUBLAS", "CUDA", "CUDNN", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTHON",
    "PYTORCH_", "TORCH", "TRITON_",
)
# fmt: on
"""Prefixes of variables of our own environment, which stages inherit, that libraries on a device listen to."""
_WHICH_DEVICE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")


def with_grounds(
    runs: Sequence[StageRun], devices: Mapping[int, DeviceInfo], environment: Mapping[str, str]
) -> tuple[StageRun, ...]:
    """The runs, each with its grounds. Reads files; what cannot be read is a ground like any other."""
    versions = _versions()
    checkpoints = {run.spec.model_dir: checkpoint_mark(run.spec.model_dir) for run in runs}
    neighbours = _by_device(runs)
    drivers = {backend: _driver(backend) for backend in {run.backend for run in runs}}
    return tuple(
        replace(
            run,
            grounds={
                **versions,
                **_of_stage(run),
                "checkpoint": checkpoints[run.spec.model_dir],
                "device": _device(run, devices[run.device_index]),
                "driver": drivers[run.backend],
                "environment": _hash(_environment(run, environment)),
                "neighbours": _hash([mark for name, mark in neighbours[run.device_index] if name != run.name]),
            },
        )
        for run in runs
    )


def _of_stage(run: StageRun) -> dict[str, str]:
    spec = spec_to_json(run.spec)
    # Where the checkpoint lies changes nothing; what it is has a ground of its own.
    del spec["model_dir"], spec["plan_file"]
    sizes = spec.pop("capture_sizes")
    return {
        "config": _hash([run.engine, spec]),
        "engine code": _engine_code(run.engine),
        "capture sizes": _hash(sizes),
        "budget": f"{run.utilization} {run.budget_bytes}",
    }


def _by_device(runs: Sequence[StageRun]) -> dict[int, list[tuple[str, Any]]]:
    """What shares each device, in an order that the config's does not change: name, and what it may hold."""
    found: dict[int, list[tuple[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run.name):
        found.setdefault(run.device_index, []).append(
            (run.name, [run.name, run.engine, run.utilization, run.budget_bytes])
        )
    return found


def _device(run: StageRun, info: DeviceInfo) -> str:
    """Model and size; of a simulated one also what its machine charges for a context."""
    context = "" if run.machine is None else f", context {run.machine.context_bytes}"
    return f"{run.backend} {info.name}, {info.total_bytes}{context}"


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in _LIBRARIES}
    # Its own files as well: a checkout has one version for years.
    ours = [_file_mark(path) for path in sorted(Path(stagelaunch.__file__).parent.rglob("*.py"))]
    return found | {"stagelaunch": f"{_version('stagelaunch')} {_hash(ours)}", "python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _driver(backend: str) -> str:
    """The kernel module's version, from a file: NVML can hang. Where none tells, the driver is that of this boot."""
    if backend != "cuda":
        return "none"
    for path in _DRIVER_FILES:
        try:
            return path.read_text(errors="replace").strip()[:200]
        except OSError:
            continue
    return f"of boot {boot_id()}"


def _environment(run: StageRun, environment: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in environment.items() if name.startswith(_INHERITED)}
    return {name: value for name, value in {**inherited, **run.env}.items() if name not in _WHICH_DEVICE}


def checkpoint_mark(model_dir: Path) -> str:
    """Changes with config, index, or any file of weights: the content of the small, size and time of the large."""
    return _hash(list(_checkpoint_parts(model_dir)))


def _checkpoint_parts(model_dir: Path) -> Iterator[list[Any]]:
    try:
        names = set(os.listdir(model_dir))
    except OSError as error:
        yield ["directory", error.errno]
        return
    weights = {name for name in names if name.endswith(_WEIGHT_SUFFIXES)} | _indexed(model_dir / INDEX_NAME)
    for name in sorted(names & {CONFIG_NAME, INDEX_NAME}):
        yield [name, _content_mark(model_dir / name)]
    for name in sorted(weights):
        yield [name, _file_mark(model_dir / name)]


def _indexed(path: Path) -> set[str]:
    """The files that an index names, wherever they lie and whatever they are called; none of one that is no index."""
    try:
        return set(filter(None, map(str, json.loads(read_regular(path))["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _content_mark(path: Path) -> str:
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        return f"error {error.errno}"


def _file_mark(path: Path) -> list[Any]:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        return [path.name, getattr(error, "errno", None)]
    return [path.name, status.st_size, status.st_mtime_ns]


def _engine_code(engine: str) -> str:
    """Of a class that is not ours: its module's file, found without importing it."""
    places: Any = None
    spec = None
    name = ""
    for part in engine.partition(":")[0].split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return "none"
        places = spec.submodule_search_locations
    return "none" if spec is None or spec.origin is None else _hash(_file_mark(Path(spec.origin)))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
