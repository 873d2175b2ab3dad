"""Which entry of the driver's process table is this process, and whether a device stood still while it was read.

Pure rules over tables that were read elsewhere (``worker.own_memory``). A table maps the pids of a device's processes,
as the driver numbers them, to the bytes each holds; None where the driver lists a process and does not say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stagelaunch.core.ledger import Source
from stagelaunch.core.units import MIB, format_size

ProcessTable = Mapping[int, int | None]

VERIFY_BYTES = 64 * MIB
"""What is allocated to see whether a figure is really ours: it must rise by as much."""
SLACK_BYTES = 16 * MIB
"""What a driver may add to an allocation (page tables), or move by itself while nobody asks for anything."""


@dataclass(frozen=True)
class Identity:
    """The pid under which the driver knows this process, and how that was found out."""

    pid: int
    source: Source


def candidates(
    own_pids: Sequence[int], before: ProcessTable | None, after: ProcessTable | None
) -> tuple[Identity, ...]:
    """Who this process may be in the table, best guess first; to be believed only after ``confirms``.

    ``own_pids`` is our pid, then our pids in the namespaces around, as far as the kernel tells. ``before`` was read
    before our context was created, ``after`` when it and something in it was there. Only a positive figure counts.
    """
    if after is None:
        return ()
    listed = {pid for pid, size in after.items() if size}
    found = [
        Identity(pid, Source.OWN_PID if position == 0 else Source.HOST_PID)
        for position, pid in enumerate(dict.fromkeys(own_pids))
        if pid in listed
    ]
    new = [] if before is None else sorted(after.keys() - before.keys())
    if len(new) == 1 and new[0] in listed and new[0] not in own_pids:
        found.append(Identity(new[0], Source.NEW_PID))
    return tuple(found)


def confirms(before_bytes: int | None, after_bytes: int | None, grown_bytes: int) -> bool:
    """Whether a figure rose as ours must have, by ``grown_bytes`` and what a driver may add; unknown never does."""
    if not after_bytes or before_bytes is None:
        return False
    return grown_bytes <= after_bytes - before_bytes <= grown_bytes + SLACK_BYTES


@dataclass(frozen=True)
class Surroundings:
    """A device at one moment, as it looks from one process."""

    free_bytes: int | None
    """Free on the whole device, plus what our own allocator has: constant while nobody does anything else."""
    table: ProcessTable | None
    """As it was before and after free memory was read."""
    steady: bool = True
    """False when the two never agreed: then free memory and table do not belong together."""


def disturbance(
    before: Surroundings, after: Surroundings, own_pids: Collection[int], *, newcomers: int = 0
) -> str | None:
    """Why what happened between two looks is not this process's own doing; None where nothing speaks against it.

    ``newcomers``: how many processes may have appeared, 1 while our context is created: that one is we. A process
    that the driver does not list, and that takes memory or gives back less than we take, cannot be told from ourselves.
    Nor is one seen that comes and goes within one look.
    """
    if before.table is not None and after.table is not None:
        found = _table_change(before.table, after.table, own_pids, newcomers)
        if found is not None:
            return found
    if not (before.steady and after.steady):
        return "processes on the device changed each time it was looked at"
    if before.free_bytes is None or after.free_bytes is None:
        return None
    risen_bytes = after.free_bytes - before.free_bytes
    return f"free memory rose by {format_size(risen_bytes)}" if risen_bytes > SLACK_BYTES else None


def _table_change(before: ProcessTable, after: ProcessTable, own_pids: Collection[int], newcomers: int) -> str | None:
    gone = sorted(before.keys() - after.keys())
    if gone:
        return f"pid {', '.join(map(str, gone))} left the device"
    appeared = after.keys() - before.keys()
    new = sorted(appeared - set(own_pids))
    # Listed under a pid of ours: whoever else appeared is not we.
    if len(new) > (newcomers if appeared.isdisjoint(own_pids) else 0):
        return f"pid {', '.join(map(str, new))} appeared on the device"
    for pid in sorted(before.keys() & after.keys() - set(own_pids)):
        was, now = before[pid], after[pid]
        if was is not None and now is not None and was != now:
            return f"pid {pid} went from {format_size(was)} to {format_size(now)}"
    return None
