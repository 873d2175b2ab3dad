"""Reading the end of a log file without reading all of it."""

from __future__ import annotations

from pathlib import Path

_TAIL_BYTES = 1 << 16


def tail(path: Path, lines: int) -> tuple[str, ...]:
    """The last ``lines`` lines, undecodable bytes replaced; empty when there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-lines:])
