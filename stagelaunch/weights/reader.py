"""Reads a component's weights into its parameters, straight from the files.

Host memory is filled in place: the kernel scatters one ``preadv`` over several parameters and no byte is copied twice.
Everything else goes through one small host buffer that is reused, in few large copies. Never mmap: a file cut short
while it is read must be an error here, not a SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from stagelaunch.core.errors import CheckpointError, Fault
from stagelaunch.core.units import MIB
from stagelaunch.weights.faults import printable
from stagelaunch.weights.plan import ReadItem, WeightPlan
from stagelaunch.weights.validate import HEADERS_ONLY_TEXT

CHUNK_BYTES = 8 * MIB
"""Most bytes one read asks for, and the size of the host buffer. A multiple of every item size."""

MAX_BUFFERS = os.sysconf("SC_IOV_MAX")

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with (part of a parameter, host memory of the same shape and dtype); done with the memory on return."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of bytes of one target, at most a chunk long."""

    target: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Read:
    """Neighbouring pieces of one shard that one read fetches, at most a chunk together."""

    offset: int
    pieces: tuple[_Piece, ...]

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)


def fill(plan: WeightPlan, tensors: Mapping[str, torch.Tensor], copy: Copy | None, progress: Progress) -> None:
    """Fill every tensor of ``plan`` with its bytes from the checkpoint.

    ``tensors`` are the plan's targets by name, contiguous, of its shapes and dtypes (else ValueError, before anything
    is read). With ``copy`` every byte reaches its tensor through it; without, all must be in host memory and are read
    in place. ``progress`` is called with growing byte counts, first with 0 and last with the total, at most about
    every hundredth of it.

    Raises CheckpointError when the files have headers only, before anything is read; and naming file and offset when a
    file cannot be read or ends early. The tensors are then partly filled; every descriptor is closed either way.
    """
    if plan.headers_only:
        raise _fault(plan.items[0].shard.parent, HEADERS_ONLY_TEXT)
    _check_tensors(plan, tensors, in_place=copy is None)
    flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
    read_into = _in_place(flat) if copy is None else _staged(flat, copy)
    report = _Reporter(plan.total_bytes, progress)
    for shard, items in groupby(plan.items, key=lambda item: item.shard):
        with _opened(shard) as fd:
            for read in _reads(items):
                read_into(fd, shard, read)
                report.advance(read.length)
    report.finish()


class _Reporter:
    """Calls ``progress`` by bytes, not by reads: a checkpoint of many small tensors must not flood its supervisor."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._total = total_bytes
        self._progress = progress
        self._step = min(max(total_bytes // 100, MIB), 256 * MIB)
        self._done = 0
        self._reported = 0
        progress(0, total_bytes)

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._done - self._reported >= self._step:
            self._report()

    def finish(self) -> None:
        if self._reported < self._done:
            self._report()

    def _report(self) -> None:
        self._reported = self._done
        self._progress(self._done, self._total)


def _check_tensors(plan: WeightPlan, tensors: Mapping[str, torch.Tensor], *, in_place: bool) -> None:
    if tensors.keys() != plan.targets.keys():
        odd = sorted(tensors.keys() ^ plan.targets.keys())
        raise ValueError(f"tensors and plan of the {plan.component} differ in {len(odd)} names, {odd[0]} among them")
    for name, spec in plan.targets.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != getattr(torch, spec.dtype):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, the plan has {spec.dtype} {spec.shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        if tensor.is_meta or (in_place and tensor.device.type != "cpu"):
            raise ValueError(f"{name} is on {tensor.device}; it cannot be read into in place")


def _reads(items: Iterator[ReadItem]) -> Iterator[_Read]:
    """The items of one shard as reads of at most a chunk; a read spans items that are neighbours in the file."""
    begin = position = 0
    pieces: list[_Piece] = []
    for item in items:
        done = 0
        while done < item.num_bytes:
            if pieces and (
                item.begin + done != position or position - begin >= CHUNK_BYTES or len(pieces) >= MAX_BUFFERS
            ):
                yield _Read(begin, tuple(pieces))
                pieces = []
            if not pieces:
                begin = position = item.begin + done
            length = min(item.num_bytes - done, CHUNK_BYTES - (position - begin))
            pieces.append(_Piece(item.target, item.target_offset + done, length))
            done += length
            position += length
    if pieces:
        yield _Read(begin, tuple(pieces))


def _in_place(flat: Mapping[str, torch.Tensor]) -> Callable[[int, Path, _Read], None]:
    """A function that reads into the tensors' own memory."""
    memory = {name: _memory(tensor) for name, tensor in flat.items()}

    def read_into(fd: int, shard: Path, read: _Read) -> None:
        buffers = [memory[piece.target][piece.offset : piece.offset + piece.length] for piece in read.pieces]
        _read_all(fd, shard, read.offset, buffers)

    return read_into


def _staged(flat: Mapping[str, torch.Tensor], copy: Copy) -> Callable[[int, Path, _Read], None]:
    """A function that reads into one host buffer and copies from there."""
    # Pinned memory only for a GPU, and only this much of it: pinning the whole model costs a second per gigabyte.
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=any(tensor.is_cuda for tensor in flat.values()))
    memory = _memory(buffer)

    def read_into(fd: int, shard: Path, read: _Read) -> None:
        _read_all(fd, shard, read.offset, [memory[: read.length]])
        start = 0
        for piece in _joined(read.pieces):
            target = flat[piece.target]
            first, count = piece.offset // target.itemsize, piece.length // target.itemsize
            # A read's pieces may differ in item size only if a checkpoint mixes dtypes, which validation refuses.
            host = buffer[start : start + piece.length].view(target.dtype)
            copy(target[first : first + count], host)
            start += piece.length

    return read_into


def _joined(pieces: tuple[_Piece, ...]) -> Iterator[_Piece]:
    """Pieces that follow each other in the same target as one: an expert's gate and up are one copy, not two."""
    last = pieces[0]
    for piece in pieces[1:]:
        if piece.target == last.target and piece.offset == last.offset + last.length:
            last = _Piece(last.target, last.offset, last.length + piece.length)
        else:
            yield last
            last = piece
    yield last


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat host tensor, writable. Through uint8, because numpy has no bfloat16."""
    return tensor.view(torch.uint8).numpy().data


@contextmanager
def _opened(shard: Path) -> Iterator[int]:
    try:
        fd = os.open(shard, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _fault(shard, f"cannot be opened: {error.strerror}; it was there when the boot began") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _read_all(fd: int, shard: Path, offset: int, buffers: list[memoryview]) -> None:
    """Fill ``buffers`` one after the other from ``offset`` on, however little each call delivers."""
    while buffers:
        try:
            count = os.preadv(fd, buffers, offset)
        except OSError as error:
            raise _fault(shard, f"cannot be read at byte {offset:,}: {error.strerror}; check the disk") from error
        if count == 0:
            missing = sum(map(len, buffers))
            text = f"ends at byte {offset:,}, {missing:,} bytes early; it changed since it was checked: boot again"
            raise _fault(shard, text)
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]


def _fault(shard: Path, text: str) -> CheckpointError:
    return CheckpointError((Fault(printable(str(shard)), None, None, text),))
