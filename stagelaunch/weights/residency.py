"""Asks the kernel how much of a file is in the page cache. Reads nothing and changes nothing. Needs no torch."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress

_CACHESTAT = 451
"""Its number on every architecture; Linux 6.5."""
_WINDOW_BYTES = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


def resident_bytes(fd: int, ranges: Iterable[tuple[int, int]]) -> int:
    """How much of the ranges ``[begin, end)`` is in the page cache, to a page; 0 where the kernel does not say."""
    return sum(_resident(fd, begin, end) for begin, end in ranges if end > begin)


def _resident(fd: int, begin: int, end: int) -> int:
    first = begin - begin % mmap.PAGESIZE
    pages = _by_cachestat(fd, first, end)
    if pages is None:
        pages = _by_mincore(fd, first, end)
    return min(pages * mmap.PAGESIZE, end - begin)


def _by_cachestat(fd: int, begin: int, end: int) -> int | None:
    stat = _Stat()
    asked = _Range(begin, end - begin)
    failed = _libc.syscall(ctypes.c_long(_CACHESTAT), fd, ctypes.byref(asked), ctypes.byref(stat), 0)
    return None if failed else int(stat.cached)


def _by_mincore(fd: int, begin: int, end: int) -> int:
    """Through a mapping, window by window. A file of somebody else's looks resident to the kernel's answer here."""
    pages = 0
    end = min(end, os.fstat(fd).st_size)
    for start in range(begin, end, _WINDOW_BYTES):
        length = min(_WINDOW_BYTES, end - start)
        pages += _mapped_pages(fd, start, length)
    return pages


def _mapped_pages(fd: int, start: int, length: int) -> int:
    vector = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    # Not every file can be mapped, memory may be too short to promise it, and the file may just have been cut short.
    with suppress(OSError, ValueError):
        # A private mapping that may be written has an address that ctypes can take; nothing is written.
        with mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start) as area:
            view = (ctypes.c_ubyte * length).from_buffer(area)
            failed = _libc.mincore(ctypes.addressof(view), length, ctypes.byref(vector))
            del view
        return 0 if failed else sum(byte & 1 for byte in bytes(vector))
    return 0
