"""What becomes of a stage's log: how a line of it is shown, and which files move when it is put aside.

Not the reading and moving (`system.log_file`, `supervisor.logs`), which act on these rules.
"""

from __future__ import annotations

from collections.abc import Collection

MAX_LINE_CHARS = 1000
"""A longer line is cut where it is shown: what is written to a pipe in one go stays within 4096 bytes."""


def shown(line: bytes) -> str:
    """A line of a log as it may appear on a terminal: decoded, without control characters but tab, not too long."""
    # A progress bar rewrites its line; a terminal would show what it wrote last.
    text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
    text = "".join(map(_harmless, text[: MAX_LINE_CHARS + 1]))
    return text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]}..."


def _harmless(char: str) -> str:
    return char if char.isprintable() or char == "\t" else char.encode("unicode_escape").decode()


def prefixed(name: str, width: int, text: str) -> str:
    """``name | text``, aligned with those of names up to ``width`` characters."""
    return f"{name:<{width}} | {text}"


def shifts(numbers: Collection[int], keep: int) -> tuple[tuple[int, int | None], ...]:
    """What to do, in this order, to put a log aside: which number gets which; None: it is removed.

    0 is the log itself, 1 the one put aside last. At most ``keep`` numbers above 0 are there afterwards, and no 0.
    """
    ordered = sorted(numbers, reverse=True)
    return tuple((number, None if number >= keep else number + 1) for number in ordered)
