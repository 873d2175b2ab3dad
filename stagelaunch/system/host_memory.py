"""How much host memory may be used: what the machine has available, within the limits of our cgroups (v1 and v2).

Page cache counts as usable, because it makes room. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from stagelaunch.system.cgroup import locate, own_directory

_MEM_INFO = Path("/proc/meminfo")
_V1_LIMIT_NONE = 2**62
"""A v1 limit above this means none; the kernel writes the largest multiple of a page."""


def usable_bytes() -> int | None:
    """What this process and its children may take now without anything being killed; None where nothing says."""
    found = [_machine_bytes(), *_v2_bytes(own_directory()), *_v1_bytes(_v1_directory())]
    known = [size for size in found if size is not None]
    return max(0, min(known)) if known else None


def _machine_bytes() -> int | None:
    available = _numbers(_read(_MEM_INFO).replace(":", "").replace(" kB", "")).get("MemAvailable")
    return None if available is None else available * 1024


def _v2_bytes(directory: Path | None) -> Iterator[int | None]:
    """What each cgroup leaves, from our own up to the root, which has no limit."""
    # Our own need not count memory to be within the limit of one above that does: every cgroup has this file.
    while directory is not None and (directory / "cgroup.controllers").exists():
        limits = [_number(directory / name) for name in ("memory.max", "memory.high")]
        known = [limit for limit in limits if limit is not None]
        if known:
            yield headroom(min(known), _number(directory / "memory.current"), _read(directory / "memory.stat"))
        directory = directory.parent


def _v1_bytes(directory: Path | None) -> Iterator[int | None]:
    """The same: a limit is named in every cgroup below the one that has it, but what is used of it is not."""
    while directory is not None and (directory / "memory.usage_in_bytes").exists():
        stat = _read(directory / "memory.stat")
        limit = _numbers(stat).get("hierarchical_memory_limit", _V1_LIMIT_NONE)
        if limit < _V1_LIMIT_NONE:
            yield headroom(limit, _number(directory / "memory.usage_in_bytes"), stat)
        directory = directory.parent


def headroom(limit_bytes: int, used_bytes: int | None, stat: str) -> int | None:
    """What a limit leaves; of what is used, files that were read (by ``memory.stat``) make room."""
    if used_bytes is None:
        return None
    numbers = _numbers(stat)
    prefix = "total_" if "total_inactive_file" in numbers else ""
    cached = sum(numbers.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
    return limit_bytes - used_bytes + min(cached, used_bytes)


def _v1_directory() -> Path | None:
    """Where the v1 memory cgroup of this process is mounted."""
    return locate_v1(_read(Path("/proc/self/mountinfo")), _read(Path("/proc/self/cgroup")))


def locate_v1(mount_info: str, membership: str) -> Path | None:
    """The v1 memory cgroup of a process, from its ``mountinfo`` and its ``cgroup`` file; None where it has none."""
    own = next((line.split(":", 2)[2] for line in membership.splitlines() if ":memory:" in line), None)
    if own is None:
        return None
    mounts = [line for line in mount_info.splitlines() if line.rpartition(" - ")[2].startswith("cgroup ")]
    memory = [line for line in mounts if "memory" in line.split()[-1].split(",")]
    # The same lines, read as those of v2: one rule for what a container sees of the tree.
    return locate("\n".join(line.replace(" - cgroup ", " - cgroup2 ") for line in memory), f"0::{own}")


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _numbers(text: str) -> Mapping[str, int]:
    """The lines ``name number`` of a file of the kernel."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0))
