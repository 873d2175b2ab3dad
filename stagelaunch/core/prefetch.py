"""Whose weights are fetched into the page cache first, and how many bytes of them. No file is touched here.

``supervisor.prefetch`` does it, from the first moment of a boot on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stagelaunch.core.groups import init_groups
from stagelaunch.core.units import MIB

FREE_SHARE = 0.02
"""Small stages of shared devices go first if together they are at most this part of everything: it delays nobody."""

MIN_MARGIN_BYTES = 256 * MIB
MARGIN_SHARE = 8
"""One part in so many of the memory that may be used is left alone."""


@dataclass(frozen=True)
class StageBytes:
    """What a stage reads, and where it will be."""

    stage_id: int
    devices: Collection[int]
    total_bytes: int


def prefetch_order(stages: Sequence[StageBytes], *, serial: bool) -> tuple[int, ...]:
    """Stage ids in the order in which fetching their bytes ends the boot soonest.

    First the small stages of shared devices, as many as are free: such a stage measures while its neighbour is still
    being read. Then the group of devices with the most bytes, which is ready last whatever is done, and in it the
    smallest stage first; in ``serial`` order the stages of a group by id, as they boot.
    """
    by_id = {stage.stage_id: stage for stage in stages}
    groups = init_groups({stage.stage_id: stage.devices for stage in stages})
    first = [] if serial else _free_ones(stages, groups)

    def group_bytes(group: list[int]) -> int:
        return sum(by_id[stage_id].total_bytes for stage_id in group)

    rest: list[int] = []
    for group in sorted(groups, key=lambda group: (-group_bytes(group), group)):
        rest += group if serial else sorted(group, key=lambda stage_id: (by_id[stage_id].total_bytes, stage_id))
    return (*first, *(stage_id for stage_id in rest if stage_id not in first))


def _free_ones(stages: Sequence[StageBytes], groups: Sequence[Sequence[int]]) -> list[int]:
    """The smallest of those that share a device, except the largest of each group, while they are free."""
    by_id = {stage.stage_id: stage for stage in stages}
    left_bytes = FREE_SHARE * sum(stage.total_bytes for stage in stages)
    candidates = []
    for group in groups:
        ascending = sorted((by_id[stage_id].total_bytes, stage_id) for stage_id in group)
        candidates += ascending[:-1]
    found = []
    for total_bytes, stage_id in sorted(candidates):
        left_bytes -= total_bytes
        if left_bytes < 0:
            break
        found.append(stage_id)
    return found


def room_bytes(usable_bytes: int, booked_bytes: int) -> int:
    """How many bytes of page cache the prefetch may fill in all.

    ``usable_bytes``: what could be used now, page cache counted as usable; ``booked_bytes``: what the boot itself is
    going to take of that. A margin is left alone. What was fetched already counts as usable, so compare it with this.
    """
    return max(0, usable_bytes - max(MIN_MARGIN_BYTES, usable_bytes // MARGIN_SHARE) - booked_bytes)
