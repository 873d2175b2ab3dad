"""The file of simulated devices as bytes: where each figure lies, how the file comes to be. Nothing about locks.

Layout, version 1, little-endian, S = slot_count, D = device_count::

    0   char[8] magic "SLSIMDEV"   8  u32 version    12 u32 device_count   16 u32 slot_count
    20  u32 mutex_pid              24 u64 context_bytes                    32 u64 file_bytes    (header: 64 bytes)
    64          D x { u32 index, u32 error, u64 total_bytes, u64 foreign_bytes, u64 unused }
    64 + 32 D   u64 pid[S]         then u64 start_time[S]                  then u64 bytes[D][S]

Byte 0 is locked (OFD) while the tables change. A process holds the first byte of its ``pid[slot]`` as long as it
lives; a slot whose byte is not locked is dead, and its bytes do not count. A device is named here by its row.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MAGIC = b"SLSIMDEV"
VERSION = 1
SLOT_COUNT = 128
MUTEX_AT = 0

_HEADER = struct.Struct("<8sIIIIQQ24x")
_DEVICE = struct.Struct("<IIQQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SLOTS = struct.Struct(f"<{SLOT_COUNT}Q")
_MUTEX_PID_AT = 20
_ERROR_AT, _TOTAL_AT, _FOREIGN_AT = 4, 8, 16


def file_image(totals: Mapping[int, int], context_bytes: int) -> bytes:
    """A fresh file: nothing allocated, no process."""
    size = _size_of(len(totals))
    header = _HEADER.pack(MAGIC, VERSION, len(totals), SLOT_COUNT, 0, context_bytes, size)
    devices = (_DEVICE.pack(index, 0, total, 0, 0) for index, total in sorted(totals.items()))
    return b"".join((header, *devices)).ljust(size, b"\0")


def publish(path: Path, image: bytes, replace: bool) -> None:
    """Write a complete file and give it its name in one step. Without ``replace`` a file already there stays."""
    fd, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as stream:
            # Whatever the umask: the machine is every user's.
            os.fchmod(stream.fileno(), 0o666)
            stream.write(image)
        if replace:
            os.replace(draft, path)
        else:
            # link() fails where rename() would overwrite the file of whoever was faster.
            with suppress(FileExistsError):
                os.link(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


def map_file(fd: int) -> mmap.mmap:
    """Map an open file; ValueError with the cause when it is not one of ours."""
    there = os.fstat(fd)
    cause = _damage(os.pread(fd, _HEADER.size, 0) if stat.S_ISREG(there.st_mode) else b"", there.st_size)
    if cause is not None:
        raise ValueError(cause)
    return mmap.mmap(fd, there.st_size)


def _damage(header: bytes, size: int) -> str | None:
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        return "it is not a file of simulated devices"
    _, version, count, slots, _, _, file_bytes = _HEADER.unpack(header)
    if version != VERSION or slots != SLOT_COUNT:
        return f"it was written by another version of stagelaunch (layout {version}, {slots} slots)"
    if not size == file_bytes == _size_of(count):
        return f"it is damaged ({size} bytes where {_size_of(count)} are needed)"
    return None


def _size_of(device_count: int) -> int:
    return _HEADER.size + _DEVICE.size * device_count + _SLOTS.size * (2 + device_count)


class Tables:
    """Typed access to a mapped file. Takes no lock."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        _, _, device_count, _, _, context_bytes, _ = _HEADER.unpack_from(view)
        self.device_count, self.context_bytes = int(device_count), int(context_bytes)
        self._pids_at = _HEADER.size + _DEVICE.size * self.device_count
        self._starts_at = self._pids_at + _SLOTS.size
        self._bytes_at = self._starts_at + _SLOTS.size
        self.row_of = {self._u32(_HEADER.size + _DEVICE.size * row): row for row in range(self.device_count)}
        """Row by device index."""

    def slot_lock_at(self, slot: int) -> int:
        """The byte whose lock says that the slot's process lives."""
        return self._pids_at + 8 * slot

    def total_bytes(self, row: int) -> int:
        """Capacity of a device."""
        return self._u64(self._device_at(row) + _TOTAL_AT)

    def foreign_bytes(self, row: int) -> int:
        """What the outside holds of a device."""
        return self._u64(self._device_at(row) + _FOREIGN_AT)

    def set_foreign_bytes(self, row: int, size_bytes: int) -> None:
        """Set what the outside holds."""
        _U64.pack_into(self._view, self._device_at(row) + _FOREIGN_AT, size_bytes)

    def error(self, row: int) -> int:
        """The injected error code; 0 for a healthy device."""
        return self._u32(self._device_at(row) + _ERROR_AT)

    def set_error(self, row: int, code: int) -> None:
        """Set the injected error code."""
        _U32.pack_into(self._view, self._device_at(row) + _ERROR_AT, code)

    def mutex_pid(self) -> int:
        """Who took the mutex last."""
        return self._u32(_MUTEX_PID_AT)

    def set_mutex_pid(self, pid: int) -> None:
        """Sign the mutex, for whoever waits in vain."""
        _U32.pack_into(self._view, _MUTEX_PID_AT, pid)

    def pids(self) -> tuple[int, ...]:
        """The pid of every slot, dead ones included; 0 for one never used."""
        return _SLOTS.unpack_from(self._view, self._pids_at)

    def start_time(self, slot: int) -> int:
        """When the slot's process started, in clock ticks since boot."""
        return self._u64(self._starts_at + 8 * slot)

    def held_bytes(self, row: int, slot: int) -> int:
        """What a slot's process holds of a device."""
        return self._u64(self._bytes_at + _SLOTS.size * row + 8 * slot)

    def set_held_bytes(self, row: int, slot: int, size_bytes: int) -> None:
        """Set what a slot's process holds."""
        _U64.pack_into(self._view, self._bytes_at + _SLOTS.size * row + 8 * slot, size_bytes)

    def occupy(self, slot: int, pid: int, start_time: int) -> None:
        """Give a slot to a process that holds nothing yet."""
        for row in range(self.device_count):
            self.set_held_bytes(row, slot, 0)
        _U64.pack_into(self._view, self._starts_at + 8 * slot, start_time)
        _U64.pack_into(self._view, self._pids_at + 8 * slot, pid)

    def _device_at(self, row: int) -> int:
        return _HEADER.size + _DEVICE.size * row

    def _u32(self, at: int) -> int:
        return int(_U32.unpack_from(self._view, at)[0])

    def _u64(self, at: int) -> int:
        return int(_U64.unpack_from(self._view, at)[0])
