"""Sizes and durations as people write them, and back. Binary units only: 1KiB = 1024 bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_SIZE_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def _parse(text: str, units: dict[str, int] | dict[str, float], example: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not a value like {example} (units: {', '.join(units)})")
    return float(match[1]) * units[match[2]]


def parse_size(text: str | int) -> int:
    """Bytes of ``"20GiB"``, a fraction of one dropped; a bare whole number is bytes. ValueError for anything else."""
    if isinstance(text, int):
        if isinstance(text, bool) or text < 0:
            raise ValueError(f"{text!r} is not a size like 20GiB")
        return text
    if text.strip().isdecimal():
        return int(text)
    return int(_parse(text, _SIZE_UNITS, "20GiB"))


def parse_duration(text: str | float) -> float:
    """Seconds of ``"15s"``, ``"1.5m"``, ``"200ms"``, ``"2h"``. A bare number is refused: 15 what?"""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} has no unit; write {text}s")
    return _parse(text, _DURATION_UNITS, "15s")


def format_size(size_bytes: int) -> str:
    """``"59.08 GiB"``, ``"150.00 MiB"``, ``"512 B"``: the largest unit that leaves at least 1."""
    sign = "-" if size_bytes < 0 else ""
    magnitude = abs(size_bytes)
    for name, unit in reversed(_SIZE_UNITS.items()):
        if unit > 1 and magnitude >= unit:
            return f"{sign}{magnitude / unit:.2f} {name}"
    return f"{sign}{magnitude} B"


def format_sizes(sizes_bytes: Iterable[int]) -> list[str]:
    """Sizes that are read together, all in the unit of the largest: 0.40 GiB beside 59.08 GiB. 0 is ``0``."""
    sizes = list(sizes_bytes)
    largest = max(map(abs, sizes), default=0)
    name, unit = next(((n, u) for n, u in reversed(_SIZE_UNITS.items()) if largest >= u), ("B", 1))
    if unit == 1:
        return [f"{size} B" for size in sizes]
    return [f"{size / unit:.2f} {name}" if size else "0" for size in sizes]


def format_duration(duration_s: float) -> str:
    """``"0.42s"`` below a minute, ``"2m05s"`` above."""
    if duration_s < 60:
        return f"{duration_s:.2f}s"
    minutes, seconds = divmod(round(duration_s), 60)
    return f"{minutes}m{seconds:02d}s"
