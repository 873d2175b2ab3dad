"""The simulated devices of one machine: one mmap'd file (layout: ``simlayout``), shared by all its processes.

Capacity is hard across processes; what a process holds comes back when it dies, however it dies. The file plays the
driver: no torch here, so tools, the supervisor and a fake NVML library can read it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import (
    DeviceInfo,
    DeviceProcess,
    Inventory,
    SimulatedMachine,
    UnusableDevice,
    simulated_uuid,
)
from stagelaunch.core.units import format_duration
from stagelaunch.devices import ofd, simlayout

DEVICE_NAME = "stagelaunch simulated device"
MUTEX_TIMEOUT_S = 10.0
_PAUSE_FIRST_S, _PAUSE_MAX_S = 20e-6, 1e-3


class SimulatedFileAbsentError(NoDeviceError):
    """There is no file, or only one of another machine that nobody uses: ``open`` would create it."""


class SimulatedFile:
    """One process's handle on the file. It takes a slot with its first allocation and keeps it until ``close``.

    Usable from several threads. After a fork it is closed in the child, which must open its own.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._view = _map(path, fd)
        self._tables = simlayout.Tables(self._view)
        self._slot: int | None = None
        self._closed = self._forked = False
        # OFD locks do not exclude threads that share the description.
        self._threads = threading.Lock()
        _open_files.add(self)

    @classmethod
    def open(
        cls, machine: SimulatedMachine, create: bool = True, *, timeout_s: float = MUTEX_TIMEOUT_S
    ) -> SimulatedFile:
        """The file of ``machine``, created when it is not there.

        A file of other capacities is replaced when no live process uses it. NoDeviceError when one does, when
        the file is damaged or something else, when it cannot be created, or when its mutex is not free in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            file = _open_or_create(machine, create)
            try:
                with file._mutex(deadline_s):
                    if file._is_current():
                        if file._describes(machine):
                            return file
                        file._refuse_replacing(create)
                        # Under the old file's mutex: whoever opened it too finds that it is no longer current.
                        _publish(machine, replace=True)
            except OSError as error:
                file.close()
                raise _cannot_open(file.path, error) from error
            except BaseException:
                file.close()
                raise
            file.close()

    # What a device asks.

    def allocate(self, index: int, size_bytes: int) -> bool:
        """Charge ``size_bytes`` of device ``index`` to this process; False, and nothing charged, if it has no room."""
        row = self._row_of(index)
        if size_bytes < 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        with self._mutex():
            if self._slot is None:
                self._slot = self._claim_slot()
            if self._used_bytes(row) + size_bytes > self._tables.total_bytes(row):
                return False
            self._tables.set_held_bytes(row, self._slot, self._held_bytes(row) + size_bytes)
            return True

    def free(self, index: int, size_bytes: int) -> None:
        """Give back ``size_bytes`` that this process holds on device ``index``; ValueError if it holds less."""
        row = self._row_of(index)
        with self._mutex():
            held_bytes = self._held_bytes(row)
            if not 0 <= size_bytes <= held_bytes:
                raise ValueError(f"cannot free {size_bytes} bytes of device {index}: this process holds {held_bytes}")
            if self._slot is not None:
                self._tables.set_held_bytes(row, self._slot, held_bytes - size_bytes)

    def process_bytes(self, index: int) -> int:
        """What this process holds on device ``index`` through this handle."""
        row = self._row_of(index)
        with self._mutex():
            return self._held_bytes(row)

    def process_table(self, index: int) -> dict[int, int]:
        """What each live process holds on device ``index``, by pid; whoever holds nothing is not in it."""
        row = self._row_of(index)
        table: dict[int, int] = {}
        with self._mutex():
            pids = self._tables.pids()
            for slot in self._live_slots():
                # A process may have opened the file more than once.
                table[pids[slot]] = table.get(pids[slot], 0) + self._tables.held_bytes(row, slot)
        return {pid: size_bytes for pid, size_bytes in table.items() if size_bytes}

    def free_bytes(self, index: int) -> int:
        """What nobody holds on device ``index``; dead processes hold nothing."""
        row = self._row_of(index)
        with self._mutex():
            return max(0, self._tables.total_bytes(row) - self._used_bytes(row))

    def total_bytes(self, index: int) -> int:
        """Capacity of device ``index``. Takes no lock."""
        return self._tables.total_bytes(self._row_of(index))

    def error(self, index: int) -> int:
        """The error code injected into device ``index``; 0 for a healthy one. Takes no lock."""
        return self._tables.error(self._row_of(index))

    # What tests and tools do.

    def set_foreign_bytes(self, index: int, size_bytes: int) -> None:
        """Play a process outside: it holds ``size_bytes`` of device ``index``, be there room or not."""
        row = self._row_of(index)
        with self._mutex():
            self._tables.set_foreign_bytes(row, size_bytes)

    def set_error(self, index: int, code: int) -> None:
        """Break device ``index`` for every process; 0 repairs it."""
        row = self._row_of(index)
        with self._mutex():
            self._tables.set_error(row, code)

    def snapshot(self, *, timeout_s: float = MUTEX_TIMEOUT_S) -> tuple[DeviceInfo, ...]:
        """Every device by index, with the live processes that hold memory on it."""
        tables = self._tables
        with self._mutex(time.monotonic() + timeout_s):
            pids, live = tables.pids(), self._live_slots()
            owners = {slot: (pids[slot], tables.start_time(slot)) for slot in live}
            figures = {
                index: (tables.total_bytes(row), self._used_bytes(row), [(s, tables.held_bytes(row, s)) for s in live])
                for index, row in tables.row_of.items()
            }
        # Looked up without the mutex: reading /proc may take its time.
        names = {owner: _process_name(*owner) for owner in owners.values()}
        infos = []
        for index, (total, used, held) in sorted(figures.items()):
            sizes: dict[tuple[int, int], int] = {}
            for slot, size_bytes in held:
                # A process may have opened the file more than once.
                sizes[owners[slot]] = sizes.get(owners[slot], 0) + size_bytes
            processes = tuple(DeviceProcess(owner[0], names[owner], n) for owner, n in sorted(sizes.items()) if n)
            infos.append(_device_info(index, total, used, processes))
        return tuple(infos)

    def close(self) -> None:
        """Let go of the file; what this handle held is free again. Idempotent."""
        with self._threads:
            self._abandon()

    def _abandon(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)
            # The mapping refers to the same description: the locks last until it is gone as well.
            self._view.close()

    def _forget_after_fork(self) -> None:
        self._threads = threading.Lock()
        self._forked = True
        # Close, never unlock: the description is the parent's too.
        self._abandon()

    def _check_usable(self) -> None:
        if self._forked:
            raise RuntimeError(f"cannot use {self.path}: it was opened before a fork; open it again in the child")
        if self._closed:
            raise RuntimeError(f"cannot use {self.path}: it is closed; open it again")

    def _row_of(self, index: int) -> int:
        self._check_usable()
        row = self._tables.row_of.get(index)
        if row is None:
            there = ", ".join(map(str, sorted(self._tables.row_of))) or "none"
            raise _refused(
                f"cannot use simulated device {index} of {self.path}: there is no such device;"
                f" name one of those that are there: {there}"
            )
        return row

    @contextmanager
    def _mutex(self, deadline_s: float | None = None) -> Iterator[None]:
        with self._threads:
            self._check_usable()
            if not ofd.try_lock(self._fd, simlayout.MUTEX_AT):
                self._wait_for_mutex(time.monotonic() + MUTEX_TIMEOUT_S if deadline_s is None else deadline_s)
            self._tables.set_mutex_pid(os.getpid())
            try:
                yield
            finally:
                ofd.unlock(self._fd, simlayout.MUTEX_AT)

    def _wait_for_mutex(self, deadline_s: float) -> None:
        started_s, pause_s = time.monotonic(), _PAUSE_FIRST_S
        while not ofd.try_lock(self._fd, simlayout.MUTEX_AT):
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise _refused(
                    f"cannot lock simulated devices {self.path}: pid {self._tables.mutex_pid()} did not let go"
                    f" within {format_duration(now_s - started_s)}; continue or end that process"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_MAX_S)

    # Under the mutex.

    def _claim_slot(self) -> int:
        if not self._is_current():
            raise _refused(
                f"cannot use simulated devices {self.path}: the file was replaced by one of other capacities;"
                " restart this process, or give each machine its own file"
            )
        for slot in range(simlayout.SLOT_COUNT):
            if ofd.try_lock(self._fd, self._tables.slot_lock_at(slot)):
                self._tables.occupy(slot, os.getpid(), _start_time(os.getpid()) or 0)
                return slot
        raise _refused(
            f"cannot use simulated devices {self.path}: all {simlayout.SLOT_COUNT} process slots are taken;"
            " end some of the processes that use them"
        )

    def _live_slots(self) -> list[int]:
        return [
            slot
            for slot, pid in enumerate(self._tables.pids())
            # The kernel does not report one's own lock.
            if pid and (slot == self._slot or ofd.locked_by_another(self._fd, self._tables.slot_lock_at(slot)))
        ]

    def _used_bytes(self, row: int) -> int:
        held_bytes = sum(self._tables.held_bytes(row, slot) for slot in self._live_slots())
        return self._tables.foreign_bytes(row) + held_bytes

    def _held_bytes(self, row: int) -> int:
        return 0 if self._slot is None else self._tables.held_bytes(row, self._slot)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _describes(self, machine: SimulatedMachine) -> bool:
        totals = {index: self._tables.total_bytes(row) for index, row in self._tables.row_of.items()}
        return totals == dict(machine.total_bytes) and self._tables.context_bytes == machine.context_bytes

    def _refuse_replacing(self, create: bool) -> None:
        pids = self._tables.pids()
        live = sorted({pids[slot] for slot in self._live_slots()})
        if live:
            raise _refused(
                f"cannot use simulated devices {self.path}: pid {', '.join(map(str, live))} uses them with other"
                " capacities; end it, or give this machine another file"
            )
        if not create:
            raise SimulatedFileAbsentError((f"cannot read simulated devices {self.path}: left by another machine",))


_open_files: weakref.WeakSet[SimulatedFile] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    # A child that kept the description would keep its parent's slot alive after the parent's death.
    for file in list(_open_files):
        file._forget_after_fork()


os.register_at_fork(after_in_child=_close_in_forked_child)


def list_simulated_devices(machine: SimulatedMachine, timeout_s: float = MUTEX_TIMEOUT_S) -> tuple[DeviceInfo, ...]:
    """The devices of ``machine`` as they are now. Creates nothing: without a file every device is free."""
    try:
        file = SimulatedFile.open(machine, create=False, timeout_s=timeout_s)
    except SimulatedFileAbsentError:
        return tuple(_device_info(index, total, 0, ()) for index, total in sorted(machine.total_bytes.items()))
    try:
        return file.snapshot(timeout_s=timeout_s)
    finally:
        file.close()


def simulated_inventory(machine: SimulatedMachine, timeout_s: float = MUTEX_TIMEOUT_S) -> Inventory:
    """The same; one with an error injected is there, but cannot be used."""
    devices = list_simulated_devices(machine, timeout_s)
    try:
        file = SimulatedFile.open(machine, create=False, timeout_s=timeout_s)
    except SimulatedFileAbsentError:
        return Inventory(devices)
    try:
        errors = {info.index: code for info in devices if (code := file.error(info.index))}
    finally:
        file.close()
    return Inventory(
        tuple(info for info in devices if info.index not in errors),
        tuple(
            UnusableDevice(info.index, info.uuid, info.name, f"it cannot be read: error {errors[info.index]}")
            for info in devices
            if info.index in errors
        ),
    )


def _device_info(index: int, total: int, used: int, processes: tuple[DeviceProcess, ...]) -> DeviceInfo:
    return DeviceInfo(index, simulated_uuid(index), DEVICE_NAME, total, max(0, total - used), processes)


def _process_name(pid: int, start_time: int) -> str:
    # Imported here: every start reads the file, and few meet somebody else in it.
    import psutil

    try:
        # Another process of that number (another PID namespace) must not lend its name.
        return psutil.Process(pid).name() if _start_time(pid) == start_time else "unknown"
    except psutil.Error:
        return "unknown"


def _start_time(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])


def _refused(text: str) -> NoDeviceError:
    return NoDeviceError((text,))


def _cannot_open(path: Path, error: OSError) -> NoDeviceError:
    return _refused(
        f"cannot open simulated devices {path}: {error.strerror or error};"
        " name a file that every user of this machine can read and write"
    )


def _open_or_create(machine: SimulatedMachine, create: bool) -> SimulatedFile:
    path = Path(machine.path)
    try:
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _publish(machine, replace=False)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise SimulatedFileAbsentError((f"cannot read simulated devices {path}: there is no such file",)) from error
    except OSError as error:
        raise _refused(
            f"cannot open simulated devices {path}: {error.strerror or error};"
            " name a file that every user of this machine can read and write"
        ) from error
    try:
        return SimulatedFile(path, fd)
    except BaseException:
        os.close(fd)
        raise


def _publish(machine: SimulatedMachine, replace: bool) -> None:
    simlayout.publish(Path(machine.path), simlayout.file_image(machine.total_bytes, machine.context_bytes), replace)


def _map(path: Path, fd: int) -> mmap.mmap:
    try:
        return simlayout.map_file(fd)
    except ValueError as error:
        raise _refused(
            f"cannot use simulated devices {path}: {error}; remove it when nothing uses it, or name another file"
        ) from error
