"""Whether a checkpoint holds exactly the components its config describes, in the dtype a stage asks for.

Works on an index that ``read_index`` found whole. Called by the supervisor before anything starts. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from stagelaunch.core.errors import CheckpointError
from stagelaunch.weights.faults import FaultList
from stagelaunch.weights.index import CONFIG_NAME, INDEX_NAME, CheckpointIndex, TensorEntry
from stagelaunch.weights.omni_spec import COMPONENTS, component_dtype, expected_tensors

TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors' name of a dtype a stage can run in -> torch's."""

HEADERS_ONLY_TEXT = "holds headers only: there is no data in it; plan with it, but boot from the model's own files"


def require_data(index: CheckpointIndex) -> None:
    """Nothing, if the checkpoint has data; CheckpointError for one of headers only: it can be planned, not booted."""
    faults = FaultList()
    if index.headers_only:
        faults.add("headers only", index.model_dir, None, HEADERS_ONLY_TEXT)
    faults.raise_if_any()


def validate_component(index: CheckpointIndex, component: str, dtype: str = "auto") -> None:
    """Nothing, if the tensors of ``component`` are the config's in name, shape and dtype: none missing, none besides.

    ``dtype`` is torch's name, or ``auto`` for the one config.json names. Weights are never converted: a bfloat16
    checkpoint run as float32 would need twice the memory that was planned for it. Raises CheckpointError with all
    faults.
    """
    faults = FaultList()
    _check(index, component, dtype, faults)
    faults.raise_if_any()


def validate(index: CheckpointIndex, components: Mapping[str, str] | Iterable[str]) -> None:
    """``validate_component`` for several components, all faults at once; and no tensor belongs to no component.

    ``components`` maps each to its dtype; a plain list of them means ``auto``.
    """
    faults = FaultList()
    wanted = components if isinstance(components, Mapping) else dict.fromkeys(components, "auto")
    for component, dtype in wanted.items():
        _check(index, component, dtype, faults)
    for key, entry in index.tensors.items():
        if key.partition(".")[0] not in COMPONENTS:
            text = f"belongs to none of {', '.join(COMPONENTS)}; use an unmodified checkpoint"
            faults.add("tensors of no component", entry.shard, key, text)
    faults.raise_if_any()


def _check(index: CheckpointIndex, component: str, dtype: str, faults: FaultList) -> None:
    config_file = index.model_dir / CONFIG_NAME
    try:
        expected = expected_tensors(index.config, component)
        wanted = component_dtype(index.config) if dtype == "auto" else dtype
    except CheckpointError as error:
        for fault in error.faults:
            faults.add(f"values of the {component}'s config", config_file, fault.key, fault.text)
        return
    prefix = f"{component}."
    present = {key: entry for key, entry in index.tensors.items() if key.startswith(prefix)}
    if not present:
        text = (
            f"the checkpoint holds no tensor of the {component} ({len(expected):,} expected); download all its shards"
        )
        faults.add(f"no {component}", index.model_dir, prefix + "*", text)
        return
    _check_dtypes(index, present, component, wanted, dtype, faults)
    where = _index_file(index)
    for key, shape in expected.items():
        if key not in present:
            text = f"is missing: {CONFIG_NAME} calls for it, with shape {list(shape)}; download the checkpoint again"
            faults.add(f"missing tensors of the {component}", where, key, text)
    for key, entry in present.items():
        if key not in expected:
            text = (
                f"is unexpected: the model {CONFIG_NAME} describes has no such tensor; use the model's own config.json"
            )
            faults.add(f"unexpected tensors of the {component}", entry.shard, key, text)
        elif entry.shape != expected[key]:
            text = (
                f"has shape {list(entry.shape)}, {CONFIG_NAME} calls for {list(expected[key])}; "
                "use the model's own config.json"
            )
            faults.add(f"wrong shapes in the {component}", entry.shard, key, text)


def _check_dtypes(
    index: CheckpointIndex,
    present: Mapping[str, TensorEntry],
    component: str,
    wanted: str,
    asked: str,
    faults: FaultList,
) -> None:
    """One fault for a component that is wholly in another dtype, else one for each tensor that is."""
    found = {entry.dtype for entry in present.values()}
    if len(found) == 1:
        (only,) = found
        if TORCH_NAMES.get(only) != wanted:
            text = _wrong_dtype(only, wanted, asked)
            faults.add(f"dtype of the {component}", index.model_dir, f"{component}.*", text)
        return
    for key, entry in present.items():
        if TORCH_NAMES.get(entry.dtype) != wanted:
            faults.add(f"wrong dtypes in the {component}", entry.shard, key, _wrong_dtype(entry.dtype, wanted, asked))


def _index_file(index: CheckpointIndex) -> Path:
    indexed = index.model_dir / INDEX_NAME
    return indexed if indexed.exists() else index.model_dir


def _wrong_dtype(found: str, wanted: str, asked: str) -> str:
    found = TORCH_NAMES.get(found, found)
    if asked == "auto":
        return f"is {found}, {CONFIG_NAME} says {wanted}; weights are not converted: correct the checkpoint"
    return f"is {found}, the stage asks for {wanted}; weights are not converted: set the stage's dtype to auto"
