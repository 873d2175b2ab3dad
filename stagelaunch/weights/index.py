"""What a model directory holds: its config and where each tensor's bytes lie. Every shard's header is parsed once.

It knows files and the safetensors format, not the model: whether the tensors are the right ones is ``validate``'s
business. Called by the supervisor before anything starts, and by a worker for its own component. Needs no torch.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from stagelaunch.weights.faults import FaultList, printable

MODEL_TYPE = "qwen3_omni_moe"
CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAX_JSON_BYTES = 100_000_000
"""The safetensors format's own limit on a header; no config or index comes near it either."""

MAX_RANK = 16

HEADERS_ONLY = {"stagelaunch": "headers only"}
"""In a shard's metadata: its tensors have shapes and no data. Good for planning, never to be loaded."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


class FileStamp(NamedTuple):
    """What tells a file from a changed one."""

    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """The stamp of a file by its status."""
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint: what it is, and its bytes ``[begin, end)`` in its shard's file."""

    name: str
    shard: Path
    dtype: str
    """safetensors' name: ``F32``, ``BF16``, ..."""
    shape: tuple[int, ...]
    begin: int
    """Offset from the start of the file, not of the data section."""
    end: int


@dataclass(frozen=True)
class CheckpointIndex:
    """A model directory whose files are whole and agree with each other."""

    model_dir: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorEntry]
    headers_only: bool = False
    """Some shard says that there is no data in it."""
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)
    """Of config.json and every shard, as they were read."""

    def component_bytes(self) -> dict[str, int]:
        """Bytes of weights by component: the first part of a tensor's name."""
        found: dict[str, int] = {}
        for name, entry in self.tensors.items():
            component = name.partition(".")[0]
            found[component] = found.get(component, 0) + entry.end - entry.begin
        return found


def read_index(model_dir: Path) -> CheckpointIndex:
    """The config and every tensor of the checkpoint in ``model_dir``.

    Raises CheckpointError with every fault of every file at once: what is missing, is not what its name says, is cut
    short, or contradicts another file. Reads headers only.
    """
    faults = FaultList()
    if not _is_directory(model_dir, faults):
        faults.raise_if_any()
    stamps: dict[Path, FileStamp] = {}
    config = _read_config(model_dir / CONFIG_NAME, faults, stamps)
    weight_map = _read_weight_map(model_dir, faults)
    tensors, headers_only = ({}, False) if weight_map is None else _read_shards(model_dir, weight_map, faults, stamps)
    faults.raise_if_any()
    return CheckpointIndex(model_dir, config, tensors, headers_only, stamps)


def read_config(model_dir: Path) -> dict[str, Any]:
    """The config alone, checked as ``read_index`` does. Raises CheckpointError."""
    faults = FaultList()
    config = _read_config(model_dir / CONFIG_NAME, faults, {})
    faults.raise_if_any()
    return config


def _is_directory(model_dir: Path, faults: FaultList) -> bool:
    try:
        is_empty = not os.listdir(model_dir)
    except (FileNotFoundError, ValueError):
        faults.add("directory", model_dir, None, "no such directory; name a Qwen3-Omni checkpoint as `model`")
    except NotADirectoryError:
        faults.add("directory", model_dir, None, "is not a directory; name the directory of config.json as `model`")
    except OSError as error:
        faults.add("directory", model_dir, None, f"cannot be listed ({error.strerror}); check its permissions")
    else:
        if not is_empty:
            return True
        faults.add("directory", model_dir, None, "is empty; download the checkpoint into it")
    return False


def _read_file(path: Path, faults: FaultList, stamps: dict[Path, FileStamp]) -> bytes | None:
    """The whole of a small regular file; None, and a fault, if it cannot be had."""
    fd = _open_regular(path, faults)
    if fd is None:
        return None
    try:
        with os.fdopen(fd, "rb") as file:
            stamps[path] = FileStamp.of(os.fstat(fd))
            content = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        faults.add("unreadable file", path, None, f"cannot be read: {error.strerror}; check the disk")
        return None
    if len(content) > MAX_JSON_BYTES:
        faults.add("absurd file", path, None, f"is larger than {MAX_JSON_BYTES:,} bytes; download it again")
        return None
    return content


def _open_regular(path: Path, faults: FaultList) -> int | None:
    """A descriptor of a regular file; None, and a fault. O_NONBLOCK because opening a FIFO would wait for ever."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        faults.add("missing files", path, None, "is missing; download the checkpoint again")
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file name"
        faults.add("unreadable files", path, None, f"cannot be opened: {reason}; check the path and its permissions")
        return None
    text = "is not a regular file; download the checkpoint again"
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
    except OSError as error:
        text = f"cannot be looked at: {error.strerror}; check the disk"
    os.close(fd)
    faults.add("unreadable files", path, None, text)
    return None


def _read_object(path: Path, faults: FaultList, stamps: dict[Path, FileStamp] | None = None) -> dict[str, Any] | None:
    """The JSON object in ``path``; None, and a fault, if there is none."""
    content = _read_file(path, faults, {} if stamps is None else stamps)
    if content is None:
        return None
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        faults.add("not JSON", path, None, f"is not JSON: {error.msg}; download it again", line=error.lineno)
    except (ValueError, RecursionError):
        faults.add("not JSON", path, None, "is not JSON; download it again")
    else:
        if isinstance(value, dict):
            return value
        faults.add("not JSON", path, None, "is not a JSON object; download it again")
    return None


def _read_config(path: Path, faults: FaultList, stamps: dict[Path, FileStamp]) -> dict[str, Any]:
    config = _read_object(path, faults, stamps)
    if config is None:
        return {}
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        text = f"is {printable(repr(model_type))}, another model; name one of type {MODEL_TYPE} as `model`"
        faults.add("another model", path, "model_type", text)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not any(str(a).startswith("Qwen3OmniMoe") for a in architectures):
        text = f"is {printable(repr(architectures))}, another model; name a Qwen3-Omni checkpoint as `model`"
        faults.add("another model", path, "architectures", text)
    return config


def _read_weight_map(model_dir: Path, faults: FaultList) -> dict[str, str] | None:
    """Tensor -> shard file name, from the index; {} when the weights are one file without index; None after a fault."""
    path = model_dir / INDEX_NAME
    if not os.path.lexists(path):
        if os.path.lexists(model_dir / SINGLE_NAME):
            return {}
        text = f"holds no weights: neither {INDEX_NAME} nor {SINGLE_NAME}; download the checkpoint again"
        faults.add("no weights", model_dir, None, text)
        return None
    index = _read_object(path, faults)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        faults.add("no weight_map", path, "weight_map", "is missing or not a filled object; download the index again")
        return None
    good: dict[str, str] = {}
    sound_names = {shard for shard in weight_map.values() if isinstance(shard, str)}  # a few, thousands of times each
    sound_names = {shard for shard in sound_names if _stays_inside(shard)}
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard in sound_names:
            good[name] = shard
        else:
            text = f"lies in {printable(repr(shard))}, which is not a file inside the directory; correct the index"
            faults.add("tensors outside the directory", path, name, text)
    return good


def _stays_inside(name: str) -> bool:
    """A relative path that stays inside the directory. Links are followed: the hub's cache is made of them."""
    if "\0" in name:
        return False
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and path.name != ""


def _read_shards(
    model_dir: Path, weight_map: dict[str, str], faults: FaultList, stamps: dict[Path, FileStamp]
) -> tuple[dict[str, TensorEntry], bool]:
    """Every tensor of every shard, checked against the index; and whether some shard has no data."""
    index_path = model_dir / INDEX_NAME
    tensors: dict[str, TensorEntry] = {}
    unread: set[str] = set()
    headers_only = False
    shards = {name: model_dir / name for name in sorted(set(weight_map.values())) or [SINGLE_NAME]}
    for shard_name, path in shards.items():
        shard = _read_shard(path, faults, stamps)
        if shard is None:
            unread.add(shard_name)
            continue
        entries, is_empty = shard
        headers_only |= is_empty
        for name, entry in entries.items():
            if name in tensors:
                text = f"is also in {printable(tensors[name].shard.name)}; download both shards again"
                faults.add("tensors in two shards", entry.shard, name, text)
            elif weight_map and name not in weight_map:
                text = f"is not in {INDEX_NAME}; download the index again"
                faults.add("tensors without index entry", entry.shard, name, text)
            else:
                tensors[name] = entry
    for name, shard_name in weight_map.items():
        found = tensors.get(name)
        if shard_name not in unread and (found is None or found.shard != shards[shard_name]):
            text = f"is not in {printable(shard_name)}, where the index puts it; download the index and the shard again"
            faults.add("tensors that their shard lacks", index_path, name, text)
    return tensors, headers_only


def _read_shard(
    path: Path, faults: FaultList, stamps: dict[Path, FileStamp]
) -> tuple[dict[str, TensorEntry], bool] | None:
    """The tensors of one safetensors file, and whether it has no data; None, and a fault, if it has no sound header."""
    fd = _open_regular(path, faults)
    if fd is None:
        return None
    try:
        stamps[path] = FileStamp.of(os.fstat(fd))
        size = stamps[path].size_bytes
        header = _read_header(fd, size, path, faults)
    except OSError as error:
        faults.add("unreadable files", path, None, f"cannot be read: {error.strerror}; check the disk")
        return None
    finally:
        os.close(fd)
    if header is None:
        return None
    fields, data_begin = header
    entries = {
        name: entry
        for name, value in fields.items()
        if name != "__metadata__" and (entry := _parse_entry(name, value, path, data_begin, faults)) is not None
    }
    if len(entries) < len(fields.keys() - {"__metadata__"}):
        return None  # reported; the gap it leaves and its index entry without tensor would only repeat that
    _check_layout(entries, data_begin, size, path, faults)
    metadata = fields.get("__metadata__")
    return entries, isinstance(metadata, dict) and metadata.items() >= HEADERS_ONLY.items()


def _read_header(fd: int, size: int, path: Path, faults: FaultList) -> tuple[dict[str, Any], int] | None:
    """The header's object and where the data begin."""
    again = "download the shard again"
    length = int.from_bytes(os.pread(fd, 8, 0), "little") if size >= 8 else 0
    if size < 8 or 8 + length > size:
        faults.add("truncated shards", path, None, f"is cut short at {size:,} bytes, inside its header; {again}")
        return None
    if length > MAX_JSON_BYTES:
        faults.add("bad headers", path, None, f"claims a header of {length:,} bytes: not a safetensors file; {again}")
        return None
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            duplicates.extend(key for key, count in counts.items() if count > 1)
        return value

    try:
        fields = json.loads(os.pread(fd, length, 8).decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        faults.add("bad headers", path, None, f"has a header that is no JSON object: not a safetensors file; {again}")
        return None
    for name in duplicates:
        faults.add("duplicate tensors", path, name, f"is twice in the header; {again}")
    return fields, 8 + length


def _is_counts(value: object, at_most: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= at_most
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _parse_entry(name: str, value: Any, path: Path, data_begin: int, faults: FaultList) -> TensorEntry | None:
    """The tensor a header entry describes; None, and a fault, if it describes none."""

    def fault(text: str) -> None:
        faults.add("bad header entries", path, name, f"{text}; download the shard again")

    if not isinstance(value, dict):
        fault("has a header entry that is not an object")
        return None
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        fault(f"has unknown dtype {printable(repr(dtype))}")
    elif not _is_counts(shape, MAX_RANK):
        fault(f"has impossible shape {printable(repr(shape))}")
    elif not _is_counts(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fault(f"has impossible data_offsets {printable(repr(offsets))}")
    elif offsets[1] - offsets[0] != prod(shape) * DTYPE_BYTES[dtype]:
        fault(f"is {dtype} {shape}, but its data_offsets span {offsets[1] - offsets[0]:,} bytes")
    else:
        return TensorEntry(name, path, dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1])
    return None


def _check_layout(entries: dict[str, TensorEntry], data_begin: int, size: int, path: Path, faults: FaultList) -> None:
    """The tensors fill the file from the header to its end, without overlap or gap."""
    position = data_begin
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            relation = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            text = f"begins at byte {entry.begin:,} and {relation}; download the shard again"
            faults.add("tensors out of place", path, entry.name, text)
        position = max(position, entry.end)
    if size < position:
        text = f"is cut short: {size:,} bytes of {position:,}; download the shard again"
        faults.add("truncated shards", path, None, text)
    elif size > position:
        text = f"is {size - position:,} bytes longer than its header says; download the shard again"
        faults.add("overlong shards", path, None, text)
