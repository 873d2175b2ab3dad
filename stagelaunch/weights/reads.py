"""The reads that fetch a plan's bytes: sorted, neighbours merged, cut into chunks. No file is touched here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stagelaunch.weights.plan import ReadItem

MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one target, at most a chunk long."""

    target: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Read:
    """Neighbouring pieces of one shard that one read fetches, at most a chunk together."""

    shard: Path
    offset: int
    length: int
    pieces: tuple[Piece, ...]


def reads_of(items: Iterable[ReadItem], chunk_bytes: int) -> Iterator[Read]:
    """The items, which are in file order, as reads that never cross a multiple of ``chunk_bytes`` in their file.

    A read spans items that are neighbours in the file, and has no more pieces than one call may have buffers.
    """
    shard, begin, position, pieces = Path(), 0, 0, list[Piece]()
    for item in items:
        done = 0
        while done < item.num_bytes:
            at = item.begin + done
            is_next = item.shard == shard and at == position and at % chunk_bytes != 0 and len(pieces) < MAX_BUFFERS
            if pieces and not is_next:
                yield Read(shard, begin, position - begin, tuple(pieces))
                pieces = []
            if not pieces:
                shard, begin = item.shard, at
            length = min(item.num_bytes - done, chunk_bytes - at % chunk_bytes)
            pieces.append(Piece(item.target, item.target_offset + done, length))
            done += length
            position = at + length
    if pieces:
        yield Read(shard, begin, position - begin, tuple(pieces))


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces that follow each other in the same target as one: an expert's gate and up are one copy, not two."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and piece.target == last.target and piece.offset == last.offset + last.length:
            last = Piece(last.target, last.offset, last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def ranges_of(items: Iterable[ReadItem]) -> Mapping[Path, tuple[tuple[int, int], ...]]:
    """What the items, which are in file order, need of each shard: ``[begin, end)``, neighbours merged."""
    found: dict[Path, list[tuple[int, int]]] = {}
    for item in items:
        ranges = found.setdefault(item.shard, [])
        if ranges and ranges[-1][1] == item.begin:
            ranges[-1] = (ranges[-1][0], item.end)
        else:
            ranges.append((item.begin, item.end))
    return {shard: tuple(ranges) for shard, ranges in found.items()}
