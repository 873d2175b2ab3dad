"""Fills the page cache with the stages' weights while nobody reads them yet: during imports, and waits for locks.

A thread of the supervisor that nobody waits for. It may leave off at any moment and fail in silence: the readers read
whatever is not there, and name what cannot be read. What and how much is decided by ``core.prefetch``.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stagelaunch.core.config import Deployment
from stagelaunch.core.prefetch import StageBytes, prefetch_order, room_bytes
from stagelaunch.core.units import KIB, MIB
from stagelaunch.system.host_memory import usable_bytes
from stagelaunch.weights.plan import WeightPlan
from stagelaunch.weights.reads import ranges_of
from stagelaunch.weights.residency import resident_bytes

STEP_BYTES = 4 * MIB
AHEAD_STEPS = 16
"""Steps that may be under way: enough to keep a disk busy, few enough to leave it to the readers at once."""

PROCESS_BYTES = 512 * MIB
"""What a stage's process takes of the host's memory beside weights, about."""

_WINDOW_BYTES = 128 * KIB
"""What the kernel fetches of one request where it does not say: its own default."""

Range = tuple[Path, int, int]
"""Shard, begin, end."""


class Prefetch:
    """One pass over ``ranges``, in their order, never above ``room`` in all; what is in the cache counts too.

    ``room`` is asked again and again, in bytes; None means that nothing may be fetched.
    """

    def __init__(self, ranges: Sequence[Range], room: Callable[[], int | None]) -> None:
        self._ranges = ranges
        self._room = room
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self.fetched_bytes = 0
        self.resident_bytes = 0
        """What was in the cache already."""

    @classmethod
    def of(cls, deployment: Deployment, plans: Mapping[int, WeightPlan]) -> Prefetch:
        """For the stages of a deployment whose devices are numbers; nothing to do where it does not want one."""
        stages = [StageBytes(i, deployment.stage(i).device_indices, plan.total_bytes) for i, plan in plans.items()]
        order = prefetch_order(stages, serial=deployment.order == "serial") if deployment.prefetch else ()
        ranges = [(shard, *r) for i in order for shard, found in ranges_of(plans[i].items).items() for r in found]
        booked = PROCESS_BYTES * len(deployment.stages)
        if deployment.backend == "simulated":
            booked += sum(plan.total_bytes for plan in plans.values())

        def room() -> int | None:
            usable = usable_bytes()
            return None if usable is None else room_bytes(usable, booked)

        return cls(ranges, room)

    def start(self) -> None:
        """Begin, in a thread of its own; where none can be had, never."""
        if self._ranges:
            with suppress(RuntimeError):
                self._thread.start()

    def stop(self) -> None:
        """Leave off. Returns at once; a step that is under way ends by itself."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Whether it is over within that time. For tests and measurements: a boot never waits for it."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        opened: tuple[Path, int] | None = None
        try:
            for shard, begin, end in self._ranges:
                if opened is None or opened[0] != shard:
                    if opened is not None:
                        os.close(opened[1])
                    opened = _opened(shard)
                if opened is None:
                    continue
                # What cannot be read, or what there is no memory for, is for the reader to say.
                with suppress(OSError, MemoryError):
                    if not self._fetch(opened[1], begin, end):
                        return
        finally:
            if opened is not None:
                os.close(opened[1])

    def _fetch(self, fd: int, begin: int, end: int) -> bool:
        """Fetch a range of a file; False when nothing more is to be fetched."""
        window_bytes = _window_bytes(fd)
        under_way: deque[int] = deque()
        for step, step_end in _steps(begin, end):
            length = step_end - step
            if self._stop.is_set() or not self._may_have(length):
                return False
            resident = resident_bytes(fd, [(step, step_end)])
            self.resident_bytes += resident
            if resident == length:
                continue
            self.fetched_bytes += length - resident
            for start in range(step, step_end, window_bytes):
                os.posix_fadvise(fd, start, min(window_bytes, step_end - start), os.POSIX_FADV_WILLNEED)
            under_way.append(step_end - 1)
            if len(under_way) > AHEAD_STEPS:
                # The kernel was only asked; one byte of a step is there when the disk has got as far.
                os.pread(fd, 1, under_way.popleft())
        return True

    def _may_have(self, more_bytes: int) -> bool:
        room = self._room()
        return room is not None and self.fetched_bytes + self.resident_bytes + more_bytes <= room


def _steps(begin: int, end: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        after = min(end, begin - begin % STEP_BYTES + STEP_BYTES)
        yield begin, after
        begin = after


def _opened(shard: Path) -> tuple[Path, int] | None:
    try:
        fd = os.open(shard, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if not _is_regular(fd):
        os.close(fd)
        return None
    with suppress(OSError):
        # What is beyond a range is another stage's: no reading ahead of what was asked for.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return shard, fd


def _is_regular(fd: int) -> bool:
    # On a network a file may be gone as soon as it is open.
    with suppress(OSError):
        return stat.S_ISREG(os.fstat(fd).st_mode)
    return False


def _window_bytes(fd: int) -> int:
    """How much of one request the kernel fetches: of a longer one it drops the rest."""
    device = os.fstat(fd).st_dev
    path = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        window = int(path.read_text()) * KIB
    except (OSError, ValueError):
        window = _WINDOW_BYTES
    return min(max(window, _WINDOW_BYTES), STEP_BYTES) if window else _WINDOW_BYTES
