"""The kinds of values a deployment file holds: sizes, durations, names, lists, and what is refused in each.

A value of the wrong kind raises ValueError with a text for the user. Used by ``core.config`` only.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from stagelaunch.core.config_rules import AUTO, ENGINE_QWEN3_OMNI
from stagelaunch.core.identity import UUID_REF_PATTERN, DeviceRef, read_ref
from stagelaunch.core.reading import MAX_THREADS
from stagelaunch.core.units import parse_duration, parse_size

_INT_MAX = 2**31 - 1
_SIZE_MAX = 2**53 - 1
"""8 PiB: above it a size is a slip of the pen, and no longer exact as a float."""
_DURATION_MAX_S = 30 * 24 * 3600.0
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_PLUGIN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_ENV_NAME = re.compile(r"[^=\x00-\x20]+")
_OURS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NOTIFY_SOCKET")
_READ_AT_START = ("LD_", "PYTHON", "GLIBC_TUNABLES", "MALLOC_")
"""Prefixes of variables that the loader, the C library or the interpreter reads before a worker can set any."""


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{_shown(value)} is not a size like 20GiB")
    try:
        size_bytes = parse_size(value)
    except OverflowError:
        size_bytes = _SIZE_MAX + 1
    if size_bytes > _SIZE_MAX:
        raise ValueError(f"{_shown(value)} is more than any device has")
    return size_bytes


def _size_above_zero(value: object) -> int:
    size_bytes = _size(value)
    if size_bytes == 0:
        raise ValueError(f"{_shown(value)} is not above zero")
    return size_bytes


def _budget(value: object) -> int | str:
    return AUTO if value == AUTO else _size_above_zero(value)


def _duration(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{_shown(value)} is not a duration like 15s")
    duration_s = parse_duration(value)
    if not 0 < duration_s <= _DURATION_MAX_S:
        raise ValueError(f"{_shown(value)} is not above zero and at most 30 days")
    return duration_s


def _rate(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.endswith("/s"):
        raise ValueError(f"{_shown(value)} is not a rate like 2GiB/s")
    return float(_size_above_zero(value.removesuffix("/s")))


def is_slug(value: str) -> bool:
    """Whether a deployment or a stage may be called so; such a name is safe as a file name."""
    return _SLUG.fullmatch(value) is not None


def _slug(value: str) -> str:
    if not is_slug(value):
        raise ValueError(
            f"{_shown(value)} is not a name: up to 48 letters, digits, '.', '_', '-', the first not a sign"
        )
    return value


def _text(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError(f"{_shown(value)} is empty or has unprintable characters")
    return value


def _engine(value: str) -> str:
    if value != ENGINE_QWEN3_OMNI and not _PLUGIN.fullmatch(value):
        raise ValueError(
            f"{_shown(value)} is neither {ENGINE_QWEN3_OMNI!r} nor a class like 'package.module:ClassName'"
        )
    return value


def not_empty(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """The value, unless it is empty."""
    # Not min_length: pydantic counts only the valid items and would call a list of wrong ones empty.
    if not value:
        raise ValueError("is empty; name at least one")
    return value


def _device(value: object) -> DeviceRef:
    if isinstance(value, str):
        if value.strip().isdecimal():
            raise ValueError(f"{_shown(value)} is a text; give a device number without quotes")
        return read_ref(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PydanticCustomError("device_type", "not a device")
    if not 0 <= value <= _INT_MAX:
        raise ValueError(f"{_shown(value)} is out of range: a device number is at least 0 and at most {_INT_MAX}")
    return value


def _devices(value: tuple[DeviceRef, ...]) -> tuple[DeviceRef, ...]:
    twice = [ref for place, ref in enumerate(value) if ref in value[:place]]
    if twice:
        raise ValueError(f"lists device {twice[0]} twice")
    return value


def _graphs(value: object) -> tuple[int, ...] | Literal["off"] | None:
    # YAML 1.1 reads a bare ``off`` as false.
    if value is False or value == "off":
        return "off"
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"{_shown(value)} is neither 'off' nor a list of batch sizes like [1, 2, 4]; leave it out for all"
        )
    for size in value:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _INT_MAX:
            raise ValueError(f"{_shown(size)} is not a batch size of at least 1")
    twice = sorted({size for size in value if value.count(size) > 1})
    if twice:
        raise ValueError(f"lists batch size {twice[0]} twice")
    return tuple(value)


def _env_name(value: str) -> str:
    if not _ENV_NAME.fullmatch(value):
        raise ValueError(f"{_shown(value)} is not a name of an environment variable")
    if value in _OURS:
        raise ValueError("stagelaunch sets this one itself; take it out")
    if value.startswith(_READ_AT_START):
        raise ValueError("is read when a process starts, before a stage can set it; set it for stagelaunch itself")
    return value


def _env_value(value: str) -> str:
    if "\0" in value or not _encodable(value):
        raise ValueError("cannot be passed to a process: it has a NUL or half a character pair")
    return value


def _encodable(value: str) -> bool:
    return not any(0xD800 <= ord(char) <= 0xDFFF for char in value)


def _machine_index(value: object) -> int:
    # JSON has only text as keys.
    if isinstance(value, str) and re.fullmatch(r"0|[1-9][0-9]{0,8}", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INT_MAX:
        raise ValueError(f"{_shown(value)} is not a device number")
    return value


def _machine_devices(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if not value:
        raise ValueError("is empty; name at least one device, like {0: 1GiB}")
    seen = [str(key) for key in value]
    twice = sorted({key for key in seen if seen.count(key) > 1})
    if twice:
        raise ValueError(f"lists device {twice[0]} twice")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^\s*(\d+|\d+(\.\d+)?\s*(B|KiB|MiB|GiB|TiB))\s*$"},
    ],
    "examples": ["20GiB", "512MiB"],
}
_BUDGET_SCHEMA = {"anyOf": [{"const": AUTO}, _SIZE_SCHEMA], "examples": ["20GiB", AUTO]}
_DURATION_SCHEMA = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*(ms|s|m|h)\s*$", "examples": ["15s", "1.5m"]}
_RATE_SCHEMA = {"type": ["string", "null"], "pattern": r"/s$", "examples": ["2GiB/s"]}
_GRAPHS_SCHEMA = {
    "anyOf": [
        {"enum": ["off", False, None]},
        {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "uniqueItems": True},
    ]
}
_DEVICE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": _INT_MAX},
        {"type": "string", "pattern": f"^{UUID_REF_PATTERN}$"},
    ],
    "examples": [0, "GPU-8932f937"],
}
AT_LEAST_ONE = Field(json_schema_extra={"minItems": 1})
_as_list = PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value, when_used="json")
_seconds = PlainSerializer(lambda value: f"{value:.9f}".rstrip("0").rstrip(".") + "s", when_used="json")
_bytes_per_s = PlainSerializer(lambda value: None if value is None else f"{int(value)}B/s", when_used="json")

Size = Annotated[int, BeforeValidator(_size), WithJsonSchema(_SIZE_SCHEMA)]
SizeAboveZero = Annotated[int, BeforeValidator(_size_above_zero), WithJsonSchema(_SIZE_SCHEMA)]
Budget = Annotated[int | Literal["auto"], BeforeValidator(_budget), WithJsonSchema(_BUDGET_SCHEMA)]
KVWeight = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Duration = Annotated[float, BeforeValidator(_duration), WithJsonSchema(_DURATION_SCHEMA), _seconds]
Rate = Annotated[float | None, PlainValidator(_rate), WithJsonSchema(_RATE_SCHEMA), _bytes_per_s]
Text = Annotated[StrictStr, AfterValidator(_text)]
Slug = Annotated[StrictStr, AfterValidator(_slug), WithJsonSchema({"type": "string", "pattern": f"^{_SLUG.pattern}$"})]
Count = Annotated[StrictInt, Field(ge=1, le=_INT_MAX)]
Threads = Annotated[StrictInt, Field(ge=1, le=MAX_THREADS)]
Attempts = Annotated[StrictInt, Field(ge=0, le=1000)]
Index = Annotated[StrictInt, Field(ge=0, le=_INT_MAX)]
MachineIndex = Annotated[int, BeforeValidator(_machine_index)]
EnvName = Annotated[StrictStr, AfterValidator(_env_name)]
EnvValue = Annotated[StrictStr, AfterValidator(_env_value)]
Graphs = Annotated[
    tuple[int, ...] | Literal["off"] | None, PlainValidator(_graphs), WithJsonSchema(_GRAPHS_SCHEMA), _as_list
]

Engine = Annotated[StrictStr, AfterValidator(_engine)]
Utilization = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
Device = Annotated[int | str, PlainValidator(_device), WithJsonSchema(_DEVICE_SCHEMA)]
StageDevices = Annotated[tuple[Device, ...], AfterValidator(not_empty), AfterValidator(_devices), AT_LEAST_ONE]
MachineDevices = Annotated[dict[MachineIndex, SizeAboveZero], BeforeValidator(_machine_devices)]
