"""Which stages depend on each other's devices: the connected components of stages over shared devices.

Not an order and not a schedule (that is `core.launch`). Called by the planner, the supervisor and `run_init`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def init_groups(stage_devices: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Stages that share a device, directly or through a chain, are in one group; all others are apart.

    Each group is ascending, the groups are ordered by their smallest stage, and the order of the mapping and
    of the device collections does not matter. A stage without a device is a group of its own. Near-linear in
    the number of stage-device pairs.
    """
    groups: dict[int, list[int]] = {}
    parents = _join_by_device(stage_devices)
    for place, stage in enumerate(stage_devices):
        # A parent is never after its child, so the parent's own parent is its root by now: one look-up is enough.
        root = parents[place] = parents[parents[place]]
        if root == place:
            groups[place] = [stage]
        else:
            groups[root].append(stage)
    for group in groups.values():
        group.sort()
    return sorted(groups.values())


def _join_by_device(stage_devices: Mapping[int, Collection[int]]) -> list[int]:
    """A forest over the places of the stages in the mapping, each parent before its children; one tree per group.

    Places instead of stage ids keep the forest a flat list walked in memory order: with a dict of ids the
    memory traffic, not the arithmetic, makes large inputs slower than linear.
    """
    parents = list(range(len(stage_devices)))
    first_on: dict[int, int] = {}
    for place, devices in enumerate(stage_devices.values()):
        root = place
        for device in devices:
            other = first_on.setdefault(device, place)
            while (above := parents[other]) != other:
                # Halving the path keeps every later walk short; without it a long chain is quadratic.
                parents[other] = other = parents[above]
            low, high = (other, root) if other < root else (root, other)
            parents[high] = root = low
    return parents
