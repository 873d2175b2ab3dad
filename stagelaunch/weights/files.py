"""A checkpoint's files while they are read: opened, known to be unchanged, read to the last byte, or one clean error.

Never mmap: a file cut short while it is read must be an error here, not a SIGBUS. Needs no torch.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from stagelaunch.core.errors import CheckpointError, Fault
from stagelaunch.weights.faults import FaultList, printable
from stagelaunch.weights.index import FileStamp

ALIGNMENT = mmap.PAGESIZE
"""Of offset, length and memory of a direct read; enough for every disk."""


def fault(path: Path, text: str) -> CheckpointError:
    """The error that says ``text`` of one file."""
    return CheckpointError((Fault(printable(str(path)), None, None, text),))


def require_unchanged(stamps: Mapping[Path, FileStamp]) -> None:
    """Nothing, if every file is still as its stamp says; CheckpointError with every one that is not."""
    faults = FaultList()
    for path, stamp in stamps.items():
        try:
            text = _change(FileStamp.of(path.stat()), stamp)
        except OSError as error:
            text = f"cannot be looked at: {error.strerror}; it was there when the boot began"
        if text is not None:
            faults.add("changed files", path, None, text)
    faults.raise_if_any()


def _change(now: FileStamp, then: FileStamp) -> str | None:
    if now == then:
        return None
    if now.size_bytes != then.size_bytes:
        sizes = f"{then.size_bytes:,} bytes then, {now.size_bytes:,} now"
    else:
        sizes = "written to, same size"
    return f"changed since it was checked ({sizes}); start the deployment again"


@contextmanager
def opened(
    shards: Iterable[Path], stamps: Mapping[Path, FileStamp], *, direct: bool = False
) -> Iterator[Mapping[Path, int]]:
    """A descriptor of each shard, closed in the end. CheckpointError for one that is not there or has changed, also by
    the time the body is done: then what it has read may be half of one file and half of another.
    """
    with ExitStack() as stack:
        fds, known = dict[Path, int](), dict(stamps)
        for shard in shards:
            fds[shard] = _open(shard, direct=direct)
            stack.callback(os.close, fds[shard])
            status = _status(fds[shard], shard)
            if not stat.S_ISREG(status.st_mode):
                raise fault(shard, "is not a regular file; it was one when the boot began")
            _refuse_change(shard, status, known.setdefault(shard, FileStamp.of(status)))
        yield fds
        for shard, fd in fds.items():
            _refuse_change(shard, _status(fd, shard), known[shard])


def _status(fd: int, shard: Path) -> os.stat_result:
    try:
        return os.fstat(fd)
    except OSError as error:
        # On a network a file may be gone while it is open.
        raise fault(shard, f"cannot be looked at: {error.strerror}; it was there when the boot began") from error


def _refuse_change(shard: Path, now: os.stat_result, then: FileStamp) -> None:
    text = _change(FileStamp.of(now), then)
    if text is not None:
        raise fault(shard, text)


def _open(shard: Path, *, direct: bool) -> int:
    # O_NONBLOCK because opening a FIFO would wait for ever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(shard, flags | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            text = "cannot be opened for direct reads: its file system has none; set the stage's weights.backend to"
            raise fault(shard, f"{text} buffered") from error
        what = "it was there when the boot began"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            what = "all shards are open while they are read; raise the limit of open files (ulimit -n)"
        raise fault(shard, f"cannot be opened: {error.strerror}; {what}") from error
    with suppress(OSError):
        # Twice the reading ahead. Pipes and the like refuse it.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd


def takes_direct_reads(shard: Path) -> bool:
    """Whether a direct read of the file works here. Reads its first page."""
    try:
        fd = os.open(shard, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, ALIGNMENT) as page:
            return os.preadv(fd, [page], 0) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def read_all(fd: int, shard: Path, offset: int, buffers: list[memoryview]) -> None:
    """Fill ``buffers`` one after the other from ``offset`` on, however little each call delivers."""
    while buffers:
        count = _preadv(fd, shard, offset, buffers)
        if count == 0:
            raise _ends_early(shard, offset, sum(map(len, buffers)))
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]


def read_direct(fd: int, shard: Path, offset: int, length: int, buffer: memoryview) -> int:
    """Read ``[offset, offset + length)`` around the page cache; where in ``buffer`` it begins.

    ``buffer`` is aligned and has room for the length and two pages.
    """
    start = offset % ALIGNMENT
    first, wanted = offset - start, start + length
    room = -(-wanted // ALIGNMENT) * ALIGNMENT
    got = 0
    while got < wanted:
        # After a read that ended off a page its last one is read again: direct reads begin on pages only.
        again = got - got % ALIGNMENT
        now = again + _preadv(fd, shard, first + again, [buffer[again:room]])
        if now <= got:
            raise _ends_early(shard, first + got, wanted - got)
        got = now
    return start


def _preadv(fd: int, shard: Path, offset: int, buffers: list[memoryview]) -> int:
    try:
        return os.preadv(fd, buffers, offset)
    except OSError as error:
        raise fault(shard, f"cannot be read at byte {offset:,}: {error.strerror}; check the disk") from error


def _ends_early(shard: Path, offset: int, missing: int) -> CheckpointError:
    text = f"ends at byte {offset:,}, {missing:,} bytes early; it changed since it was checked: boot again"
    return fault(shard, text)
