"""Reads a component's weights into its parameters, straight from the files, with a few threads.

Host memory is filled in place: the kernel scatters one ``preadv`` over several parameters and no byte is copied twice.
Everything else goes through a small ring of host buffers, in few large copies: while one is copied to the device the
next ones are read. Only the calling thread talks to the device. Other packages that read are in ``backends``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from stagelaunch.core.reading import (
    BUFFER_BYTES,
    CHUNK_BYTES,
    IN_FLIGHT,
    Backend,
    Reading,
    bypasses_cache,
    ring_buffers,
    threads_for,
)
from stagelaunch.core.units import MIB
from stagelaunch.devices.upload import HostUploader, Mark, Uploader
from stagelaunch.system.host_memory import cpus, usable_bytes
from stagelaunch.weights import backends
from stagelaunch.weights.crew import Crew
from stagelaunch.weights.files import ALIGNMENT, fault, opened, read_all, read_direct, takes_direct_reads
from stagelaunch.weights.plan import WeightPlan
from stagelaunch.weights.reads import Read, joined, ranges_of, reads_of
from stagelaunch.weights.residency import resident_bytes
from stagelaunch.weights.validate import HEADERS_ONLY_TEXT

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_AUTO = Reading()


def fill(
    plan: WeightPlan,
    tensors: Mapping[str, torch.Tensor],
    uploader: Uploader | None,
    progress: Progress,
    reading: Reading = _AUTO,
) -> str:
    """Fill every tensor of ``plan`` with its bytes from the checkpoint; what has read them, for people.

    ``tensors`` are the plan's targets by name, contiguous, of its shapes and dtypes (else ValueError, before anything
    is read). With ``uploader`` every byte reaches its tensor through it; without, all must be in host memory and are
    read in place. ``progress`` is called with growing byte counts, first with 0 and last with the total, at most about
    every hundredth of it.

    Raises CheckpointError when the files have headers only, before anything is read; when a file is not there or has
    changed since the plan was made; and naming file and offset when one cannot be read or ends early. StageError when
    the backend is not installed. The tensors are then partly filled; no descriptor, no thread and no copy is left.
    """
    if plan.headers_only:
        raise fault(plan.items[0].shard.parent, HEADERS_ONLY_TEXT)
    _check_tensors(plan, tensors, in_place=uploader is None)
    flat = {name: tensor.detach().view(-1).view(torch.uint8) for name, tensor in tensors.items()}
    advance = _Reporter(plan.total_bytes, progress).advance
    shards = list(dict.fromkeys(item.shard for item in plan.items))
    if reading.backend.module is not None:
        with opened(shards, plan.stamps):
            backends.fill(reading.backend, plan, flat, uploader or HostUploader(), advance)
        return f"by {reading.backend.module}"
    direct = _is_direct(plan, shards, reading.backend)
    with opened(shards, plan.stamps, direct=direct) as fds:
        in_place = uploader is None and not direct
        reads = tuple(reads_of(plan.items, CHUNK_BYTES if in_place else BUFFER_BYTES))
        threads = threads_for(reading.threads, cpus(), len(reads))
        if in_place:
            _fill_in_place(fds, reads, flat, threads, advance)
        else:
            _fill_through_ring(fds, reads, flat, threads, advance, uploader or HostUploader(), direct=direct)
    return f"{Backend.DIRECT if direct else Backend.BUFFERED}, {threads} thread{'s' * (threads > 1)}"


def _is_direct(plan: WeightPlan, shards: list[Path], backend: Backend) -> bool:
    if backend is not Backend.AUTO:
        return backend is Backend.DIRECT
    with opened(shards, plan.stamps) as fds:
        usable = usable_bytes()
        if usable is None or plan.total_bytes <= usable:
            return False
        resident = sum(resident_bytes(fds[shard], ranges) for shard, ranges in ranges_of(plan.items).items())
    return bypasses_cache(plan.total_bytes, resident, usable) and all(map(takes_direct_reads, shards))


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
        is_over = self._done == self._total and self._reported < self._done
        if is_over or self._done - self._reported >= self._step:
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


Advance = Callable[[int], None]
"""Called with the bytes that are done on top."""


def _fill_in_place(
    fds: Mapping[Path, int], reads: tuple[Read, ...], flat: Mapping[str, torch.Tensor], threads: int, advance: Advance
) -> None:
    memory = {name: _memory(tensor) for name, tensor in flat.items()}

    def do(read: Read) -> int:
        buffers = [memory[piece.target][piece.offset : piece.offset + piece.length] for piece in read.pieces]
        read_all(fds[read.shard], read.shard, read.offset, buffers)
        return read.length

    with Crew(reads, do, threads).at_work() as lengths:
        for length in lengths:
            advance(length)


class _Buffer(NamedTuple):
    """A buffer of the ring, aligned for direct reads: the same bytes for torch and for the kernel."""

    tensor: torch.Tensor
    memory: memoryview


class _Filled(NamedTuple):
    """A read that is in a buffer, from its ``start``."""

    read: Read
    buffer: _Buffer
    start: int


class _Ring:
    """The buffers, and who has them: threads that read take a free one, the caller gives it back when it was copied."""

    def __init__(self, uploader: Uploader, count: int) -> None:
        self._uploader = uploader
        self._free: SimpleQueue[_Buffer | None] = SimpleQueue()
        self._under_way: deque[tuple[Mark, _Buffer]] = deque()
        self._most_under_way = min(IN_FLIGHT, count - 1)
        for _ in range(count):
            self._free.put(_aligned(uploader.buffer(BUFFER_BYTES + 3 * ALIGNMENT)))

    def take(self) -> _Buffer:
        """A free buffer; waits for one. InterruptedError when the ring is closed."""
        buffer = self._free.get()
        if buffer is None:
            self._free.put(None)
            raise InterruptedError
        return buffer

    def upload(self, filled: _Filled, flat: Mapping[str, torch.Tensor]) -> None:
        """Queue the copies of a buffer to their places. It is free when they are done, which is waited for later."""
        start = filled.start
        for piece in joined(filled.read.pieces):
            source = filled.buffer.tensor[start : start + piece.length]
            self._uploader.copy(flat[piece.target][piece.offset : piece.offset + piece.length], source)
            start += piece.length
        self._under_way.append((self._uploader.mark(), filled.buffer))
        while len(self._under_way) >= max(1, self._most_under_way):
            self._give_back()

    def _give_back(self) -> None:
        mark, buffer = self._under_way.popleft()
        mark.wait()
        self._free.put(buffer)

    def wake(self) -> None:
        """Whoever waits for a buffer waits no longer."""
        self._free.put(None)

    def drain(self) -> None:
        """Wait for every copy."""
        while self._under_way:
            self._give_back()

    def close(self) -> None:
        """Wait for every copy after a failure: its buffer must not be freed under it. What fails now is no news."""
        while self._under_way:
            with suppress(Exception):
                self._give_back()


def _fill_through_ring(
    fds: Mapping[Path, int],
    reads: tuple[Read, ...],
    flat: Mapping[str, torch.Tensor],
    threads: int,
    advance: Advance,
    uploader: Uploader,
    *,
    direct: bool,
) -> None:
    count = min(ring_buffers(threads, usable_bytes()), len(reads) + 1)
    with closing(_Ring(uploader, count)) as ring:

        def do(read: Read) -> _Filled:
            buffer, fd = ring.take(), fds[read.shard]
            if direct:
                return _Filled(read, buffer, read_direct(fd, read.shard, read.offset, read.length, buffer.memory))
            read_all(fd, read.shard, read.offset, [buffer.memory[: read.length]])
            return _Filled(read, buffer, 0)

        with Crew(reads, do, min(threads, count), ring.wake).at_work() as results:
            for filled in results:
                ring.upload(filled, flat)
                advance(filled.read.length)
        ring.drain()


def _aligned(buffer: torch.Tensor) -> _Buffer:
    tensor = buffer[-buffer.data_ptr() % ALIGNMENT :]
    return _Buffer(tensor, _memory(tensor))


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat uint8 tensor in host memory, writable."""
    return tensor.numpy().data
