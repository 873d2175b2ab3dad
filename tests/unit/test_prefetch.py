"""What is fetched first, and never more than may be; what the kernel says about memory."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelaunch.core.prefetch import FREE_SHARE, MIN_MARGIN_BYTES, StageBytes, prefetch_order, room_bytes
from stagelaunch.core.units import GIB, MIB
from stagelaunch.supervisor import prefetch as deed
from stagelaunch.supervisor.prefetch import STEP_BYTES, Prefetch
from stagelaunch.system.host_memory import _v1_bytes, _v2_bytes, headroom, locate_v1, usable_bytes
from stagelaunch.weights.residency import resident_bytes

STAGES = st.lists(
    st.tuples(st.sets(st.integers(0, 3), min_size=1, max_size=2), st.integers(0, 10_000)), max_size=8
).map(lambda drawn: [StageBytes(n, devices, size) for n, (devices, size) in enumerate(drawn)])
WAIT_S = 30.0


def qwen(thinker_on: int) -> list[StageBytes]:
    return [StageBytes(0, [thinker_on], 59_082), StageBytes(1, [1], 6_193), StageBytes(2, [1], 402)]


def test_the_order_of_the_published_deployments() -> None:
    assert prefetch_order(qwen(0), serial=False) == (2, 0, 1)
    assert prefetch_order(qwen(1), serial=False) == (2, 1, 0)
    assert prefetch_order(qwen(0), serial=True) == (0, 1, 2)
    # Not free: it would hold up the largest by a tenth.
    stages = [StageBytes(0, [0], 900), StageBytes(1, [1], 100), StageBytes(2, [1], 101)]
    assert prefetch_order(stages, serial=False) == (0, 1, 2)


@given(STAGES, st.booleans())
def test_every_stage_once_and_only_free_ones_before_the_longest(stages: list[StageBytes], serial: bool) -> None:
    order = prefetch_order(stages, serial=serial)
    assert sorted(order) == [stage.stage_id for stage in stages]
    if not stages:
        return
    total = sum(stage.total_bytes for stage in stages)
    largest = max(stages, key=lambda stage: stage.total_bytes)
    alone = not any(set(largest.devices) & set(other.devices) for other in stages if other is not largest)
    if alone and largest.total_bytes > total / 2:
        before = order[: order.index(largest.stage_id)]
        assert sum(stages[i].total_bytes for i in before) <= FREE_SHARE * total


@given(st.integers(0, 2**45), st.integers(0, 2**40))
def test_room_leaves_a_margin(usable: int, booked: int) -> None:
    room = room_bytes(usable, booked)
    assert room >= 0
    assert room == 0 or room + booked + max(MIN_MARGIN_BYTES, usable // 8) <= usable


def cold_file(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if resident_bytes(file.fileno(), [(0, size)]):
            pytest.skip("the temporary directory lies in memory")
    return path


def cached(path: Path, begin: int, end: int) -> int:
    with path.open("rb") as file:
        return resident_bytes(file.fileno(), [(begin, end)])


def test_it_fetches_the_ranges_and_nothing_else_and_not_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cold_file(tmp_path / "s", 6 * STEP_BYTES)
    advise, asked = os.posix_fadvise, [0]

    def counting(fd: int, offset: int, length: int, advice: int) -> None:
        asked[0] += length * (advice == os.POSIX_FADV_WILLNEED)
        advise(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", counting)
    wanted = (STEP_BYTES, 2 * STEP_BYTES + MIB)
    for _ in range(2):
        prefetch = Prefetch([(tmp_path / "gone", 0, 9), (path, *wanted)], lambda: GIB)
        prefetch.start()
        assert prefetch.join(WAIT_S)
        with path.open("rb") as file:
            os.pread(file.fileno(), 1, wanted[1] - 1)
    assert (prefetch.fetched_bytes, prefetch.resident_bytes) == (0, STEP_BYTES + MIB)
    assert asked == [STEP_BYTES + MIB]
    assert cached(path, *wanted) == STEP_BYTES + MIB
    assert cached(path, 3 * STEP_BYTES, 6 * STEP_BYTES) == 0


@pytest.mark.parametrize(("room", "steps"), [(0, 0), (None, 0), (2 * STEP_BYTES + MIB, 2)])
def test_it_never_fetches_beyond_its_room(tmp_path: Path, room: int | None, steps: int) -> None:
    path = cold_file(tmp_path / "s", 4 * STEP_BYTES)
    prefetch = Prefetch([(path, 0, 4 * STEP_BYTES)], lambda: room)
    prefetch.start()
    assert prefetch.join(WAIT_S)
    assert prefetch.fetched_bytes == steps * STEP_BYTES
    assert cached(path, steps * STEP_BYTES, 4 * STEP_BYTES) == 0


def test_a_stop_ends_it_between_two_steps(tmp_path: Path) -> None:
    path = cold_file(tmp_path / "s", 4 * STEP_BYTES)
    at_second, stopped = threading.Event(), threading.Event()
    asked = []

    def room() -> int:
        asked.append(1)
        if len(asked) == 2:
            at_second.set()
            assert stopped.wait(WAIT_S)
        return GIB

    prefetch = Prefetch([(path, 0, 4 * STEP_BYTES)], room)
    prefetch.start()
    assert at_second.wait(WAIT_S)
    prefetch.stop()
    stopped.set()
    assert prefetch.join(WAIT_S)
    assert prefetch.fetched_bytes == 2 * STEP_BYTES


def test_what_is_no_file_blocks_nobody_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    path = cold_file(tmp_path / "s", STEP_BYTES)
    before = os.listdir("/proc/self/fd")
    prefetch = Prefetch([(tmp_path / "fifo", 0, 9), (path, 0, STEP_BYTES)], lambda: GIB)
    prefetch.start()
    assert prefetch.join(WAIT_S)
    assert prefetch.fetched_bytes == STEP_BYTES
    monkeypatch.setattr(deed, "resident_bytes", lambda fd, ranges: os.pread(-1, 1, 0))
    failing = Prefetch([(path, 0, STEP_BYTES)], lambda: GIB)
    failing.start()
    assert failing.join(WAIT_S)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.filterwarnings("error")
def test_a_file_that_is_gone_as_soon_as_it_is_open_and_no_memory_are_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cold_file(tmp_path / "s", STEP_BYTES)
    before = os.listdir("/proc/self/fd")
    failing = Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing)
        gone = Prefetch([(path, 0, STEP_BYTES)], lambda: GIB)
        gone.start()
        assert gone.join(WAIT_S)
    assert failing.called
    no_room = Prefetch([(path, 0, STEP_BYTES)], Mock(side_effect=MemoryError))
    no_room.start()
    assert no_room.join(WAIT_S)
    assert os.listdir("/proc/self/fd") == before


V1_MOUNTS = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def test_memory_within_the_limits_of_cgroups() -> None:
    assert headroom(1000, 600, "inactive_file 100\nactive_file 200\nanon 300\n") == 700
    v1 = "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 200\nhierarchical_memory_limit 1000\n"
    assert headroom(1000, 600, v1) == 700
    assert headroom(1000, None, v1) is None
    assert headroom(1000, 1100, "") == -100
    assert locate_v1(V1_MOUNTS, "5:memory:/a/b\n0::/\n") == Path("/sys/fs/cgroup/memory/a/b")
    assert locate_v1(V1_MOUNTS.replace(",memory", ",cpu"), "5:memory:/a\n") is None
    assert locate_v1(V1_MOUNTS, "0::/x\n") is None
    usable = usable_bytes()
    assert usable is None or usable > 0


def test_a_limit_above_a_cgroup_that_counts_no_memory_counts(tmp_path: Path) -> None:
    inner = tmp_path / "limited" / "not counted"
    inner.mkdir(parents=True)
    for directory in (tmp_path, inner.parent, inner):
        files = {"cgroup.controllers": ""}
        if directory == inner.parent:
            files |= {"memory.max": "1000", "memory.high": "max", "memory.current": "600", "memory.stat": ""}
        for name, text in files.items():
            (directory / name).write_text(text)
    assert list(_v2_bytes(inner)) == [400]


def test_what_others_use_of_a_limit_above_both_counts(tmp_path: Path) -> None:
    inner = tmp_path / "limited" / "ours"
    inner.mkdir(parents=True)
    for directory, used in ((inner.parent, 900), (inner, 100)):
        (directory / "memory.stat").write_text("hierarchical_memory_limit 1000\n")
        (directory / "memory.usage_in_bytes").write_text(str(used))
    assert min(filter(None, _v1_bytes(inner))) == 100
