"""Reading the end of a log file without reading all of it."""

from __future__ import annotations

from pathlib import Path

_TAIL_BYTES = 1 << 16


def size(path: Path) -> int:
    """How long the file is now, in bytes; 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def tail(path: Path, lines: int, since: int = 0) -> tuple[str, ...]:
    """The last ``lines`` lines after byte ``since``, undecodable bytes replaced; empty when there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _TAIL_BYTES, since))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-lines:])
