"""Columns of text for people: the one way tables are laid out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), indent: int = 0) -> list[str]:
    """The lines of a table, the first row its head: as wide as their widest cell, columns in ``right`` flush right."""
    flush_right = set(right)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [" " * indent + "  ".join(_cells(row, widths, flush_right)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int], right: set[int]) -> list[str]:
    return [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths))
    ]
