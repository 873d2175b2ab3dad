"""Threads, ring, direct reads, other backends and the stage's plan: each right to the byte, and clean in failure."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_reader import content_of, empty, plan_of, quiet, write

from stagelaunch.config_file import load_deployment
from stagelaunch.core.errors import CheckpointError, ConfigError, StageError
from stagelaunch.core.reading import BUFFER_BYTES, Backend, Reading, bypasses_cache, ring_buffers, threads_for
from stagelaunch.core.units import GIB, MIB
from stagelaunch.devices.upload import HostUploader
from stagelaunch.supervisor import weight_plans
from stagelaunch.supervisor.prefetch import Prefetch
from stagelaunch.weights import files, reader, residency
from stagelaunch.weights.index import FileStamp, read_index
from stagelaunch.weights.omni_spec import COMPONENTS
from stagelaunch.weights.plan import ReadItem, TargetSpec, WeightPlan, plan_component
from stagelaunch.weights.plan_file import plan_to_json, read_plan
from stagelaunch.weights.reader import fill
from stagelaunch.weights.reads import ranges_of
from stagelaunch.weights.residency import _by_cachestat, _by_mincore, resident_bytes

PAGE = 4096


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[WeightPlan, bytes]:
    """Forty reads of two pages each, that begin and end off page borders, by four threads."""
    monkeypatch.setattr(reader, "CHUNK_BYTES", 2 * PAGE)
    monkeypatch.setattr(reader, "BUFFER_BYTES", 2 * PAGE)
    content = write(tmp_path / "s", 80 * PAGE + 40)
    plan = plan_of(
        [ReadItem(tmp_path / "s", 20, 9000, "a", 0), ReadItem(tmp_path / "s", 9000, 80 * PAGE + 40, "b", 0)],
        a=TargetSpec((2245,), "float32"),
        b=TargetSpec(((80 * PAGE + 40 - 9000) // 4,), "float32"),
    )
    return plan, content


class Quarrelsome(HostUploader):
    """Copies as late as its marks allow: a buffer that is used again before would show."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.most_queued = 0
        self.threads: set[int] = set()
        self.fail_at = fail_at

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.fail_at == 0:
            raise RuntimeError("device lost")
        self.fail_at -= 1
        self.threads.add(threading.get_ident())
        self.queued.append((target, source))

    def mark(self) -> Mark:
        self.most_queued = max(self.most_queued, len(self.queued))
        return Mark(self, len(self.queued))


class Mark:
    def __init__(self, uploader: Quarrelsome, end: int) -> None:
        self._batch = uploader.queued[:end]
        self._uploader = uploader

    def wait(self) -> None:
        while (queued := self._uploader.queued) and any(queued[0] is job for job in self._batch):
            target, source = queued.pop(0)
            target.copy_(source)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("backend", ["auto", "direct"])
@pytest.mark.parametrize("uploader", [None, Quarrelsome])
def test_every_reader_is_right_to_the_byte(
    large: tuple[WeightPlan, bytes], threads: int, backend: str, uploader: Callable[[], HostUploader] | None
) -> None:
    plan, content = large
    tensors = empty(plan)
    how = fill(plan, tensors, uploader and uploader(), quiet, Reading(Backend(backend), threads))
    assert how.startswith("direct, " if backend == "direct" else "buffered, ")
    assert content_of(tensors["a"]) + content_of(tensors["b"]) == content[20:]


def test_copies_are_queued_by_one_thread_while_the_next_are_read(large: tuple[WeightPlan, bytes]) -> None:
    uploader = Quarrelsome()
    fill(large[0], empty(large[0]), uploader, quiet, Reading(threads=4))
    assert uploader.threads == {threading.get_ident()}
    assert 2 <= uploader.most_queued <= 4  # two buffers, of two copies at most
    assert uploader.queued == []


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("backend", list(Backend))
def test_every_backend_brings_the_same_bytes(tiny_checkpoint: Path, component: str, backend: Backend) -> None:
    if backend.module is not None:
        pytest.importorskip(backend.module)
    plan = plan_component(read_index(tiny_checkpoint), component)
    ours, theirs = empty(plan), empty(plan)
    seen: list[int] = []
    fill(plan, ours, None, quiet)
    fill(plan, theirs, None, lambda done, total: seen.append(done), Reading(backend))
    assert [name for name in ours if content_of(ours[name]) != content_of(theirs[name])] == []
    assert seen[-1] == plan.total_bytes


def test_a_package_is_driven_by_its_own_interface(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """instanttensor needs a GPU: here a stand-in with its interface, over safetensors."""
    safetensors = pytest.importorskip("safetensors")

    class Opened:
        def __init__(self, paths: list[str], framework: str, device: torch.device) -> None:
            self.file = safetensors.safe_open(paths[0], framework=framework, device=str(device))

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def tensors(self):
            return ((name, self.file.get_tensor(name)) for name in self.file.keys())  # noqa: SIM118

    package = ModuleType("instanttensor")
    package.safe_open = Opened
    monkeypatch.setitem(sys.modules, "instanttensor", package)
    test_every_backend_brings_the_same_bytes(tiny_checkpoint, "code2wav", Backend.INSTANTTENSOR)
    monkeypatch.setattr(Opened, "tensors", lambda self: iter(()))
    plan = plan_component(read_index(tiny_checkpoint), "code2wav")
    with pytest.raises(CheckpointError, match="tensors were not brought by instanttensor"):
        fill(plan, empty(plan), None, quiet, Reading(Backend.INSTANTTENSOR))


def test_a_backend_that_is_not_there_is_one_clear_error(
    large: tuple[WeightPlan, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "instanttensor", None)
    with pytest.raises(StageError, match=r"cannot read weights with instanttensor: .*weights.backend to auto"):
        fill(large[0], empty(large[0]), None, quiet, Reading(Backend.INSTANTTENSOR))


def test_a_backend_that_is_not_there_is_refused_before_anything_starts(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"devices": [0], "budget": "1GiB", "max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8}
    stages = [
        {"id": 0, "name": "t", "component": "talker", **common},
        {"id": 1, "name": "c", "component": "code2wav", "weights": {"backend": "instanttensor"}, **common},
    ]
    body = {"name": "d", "model": str(tiny_checkpoint), "backend": "simulated", "stages": stages}
    (tmp_path / "d.json").write_text(json.dumps({**body, "simulated": {"devices": {"0": "9GiB"}}}))
    loaded = load_deployment(tmp_path / "d.json")
    monkeypatch.setattr(weight_plans, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"stages.c.weights.backend: instanttensor is not installed; pip install inst"
    ):
        weight_plans.check_checkpoint(loaded)
    monkeypatch.setattr(weight_plans, "find_spec", lambda name: name)
    plans = weight_plans.check_checkpoint(loaded)
    assert [(number, plan.component) for number, plan in plans.items()] == [(0, "talker"), (1, "code2wav")]


def cut(plan: WeightPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file ends in the middle of a page, while it is read."""
    preadv, truncate = os.preadv, threading.Event()

    def cutting(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not truncate.is_set():
            truncate.set()
            os.truncate(plan.items[0].shard, 30 * PAGE + 100)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cutting)


def break_disk(plan: WeightPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 40 * PAGE:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)


# Several threads read: which of them fails first is nobody's rule.
ENDS, BREAKS = r"ends at byte [1-3]\d\d,\d+, [\d,]+ bytes early", r"cannot be read at byte [1-3]\d\d,\d+: Input"


@pytest.mark.parametrize(("fault", "says"), [(cut, ENDS), (break_disk, BREAKS)])
@pytest.mark.parametrize("backend", ["buffered", "direct"])
@pytest.mark.parametrize("uploader", [None, Quarrelsome])
def test_a_file_that_fails_is_one_error_and_leaves_nothing(
    large: tuple[WeightPlan, bytes],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[WeightPlan, pytest.MonkeyPatch], None],
    says: str,
    backend: str,
    uploader: Callable[[], HostUploader] | None,
) -> None:
    fault(large[0], monkeypatch)
    before = os.listdir("/proc/self/fd"), threading.active_count()
    with pytest.raises(CheckpointError, match=f"/s: ({says})") as raised:
        fill(large[0], empty(large[0]), uploader and uploader(), quiet, Reading(Backend(backend), 4))
    assert len(raised.value.faults) == 1
    assert (os.listdir("/proc/self/fd"), threading.active_count()) == before


@pytest.mark.parametrize("fail_at", [0, 3])
def test_a_device_that_fails_ends_every_thread_and_waits_for_what_it_was_given(
    large: tuple[WeightPlan, bytes], fail_at: int
) -> None:
    uploader, before = Quarrelsome(fail_at), threading.active_count()
    with pytest.raises(RuntimeError, match="device lost"):
        fill(large[0], empty(large[0]), uploader, quiet, Reading(threads=4))
    assert threading.active_count() == before
    assert len(uploader.queued) <= 1  # of the read whose second copy failed: its mark was never made


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "directory"])
def test_what_is_no_file_any_more_blocks_nobody(large: tuple[WeightPlan, bytes], make: Callable[[Path], None]) -> None:
    shard = large[0].items[0].shard
    shard.unlink()
    make(shard)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        fill(large[0], empty(large[0]), None, quiet)


def test_a_stage_reads_by_the_plan_it_was_given_if_the_files_are_still_the_same(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    plan = plan_component(read_index(tiny_checkpoint), "talker")
    assert {path.name for path in plan.stamps} > {"config.json"}
    (tmp_path / "plan").write_text(plan_to_json(plan))
    assert read_plan(tmp_path / "plan") == plan
    text = plan_to_json(plan)
    edited = text.replace('"items":[[0,', '"items":[[0,1')
    for damaged in (text[:-5], edited, "", "[]", "\n[]"):
        (tmp_path / "plan").write_text(damaged)
        with pytest.raises(StageError, match=r"cannot read the stage's plan of its weights .*; boot again"):
            read_plan(tmp_path / "plan")


@pytest.mark.parametrize(("change", "says"), [("size", "100 bytes then, 99 now"), ("time", "written to, same size")])
def test_a_file_that_changed_since_the_plan_was_made(
    large: tuple[WeightPlan, bytes], change: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    write(path, 100)
    stamp = FileStamp.of(path.stat())
    files.require_unchanged({path: stamp})
    if change == "size":
        os.truncate(path, 99)
    else:
        os.utime(path, ns=(0, stamp.mtime_ns + 1))
    with pytest.raises(CheckpointError, match=f"config.json: changed since it was checked \\({says}\\); start the dep"):
        files.require_unchanged({path: stamp})
    shard = large[0].items[0].shard
    stale = replace(large[0], stamps={shard: FileStamp(1, 1)})
    with pytest.raises(CheckpointError, match="/s: changed since it was checked"):
        fill(stale, empty(stale), None, quiet)


@pytest.mark.parametrize("most", [2, 0])
def test_fewer_threads_than_asked_for_read_as_well(
    large: tuple[WeightPlan, bytes], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, [None] * most

    def limited(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    plan, content = large
    if most:
        tensors = empty(plan)
        fill(plan, tensors, HostUploader(), quiet, Reading(threads=4))
        assert content_of(tensors["a"]) + content_of(tensors["b"]) == content[20:]
    else:
        with pytest.raises(RuntimeError, match="can't start"):
            fill(plan, empty(plan), None, quiet)
        Prefetch([(plan.items[0].shard, 0, PAGE)], lambda: GIB).start()
    assert not [each for each in threading.enumerate() if each.name.startswith("weights")]


@pytest.mark.parametrize("backend", [Backend.BUFFERED, Backend.DIRECT])
def test_a_file_that_is_written_to_while_it_is_read(large: tuple[WeightPlan, bytes], backend: Backend) -> None:
    plan = large[0]
    shard = plan.items[0].shard

    def write_again(done: int, total: int) -> None:
        if done == total:
            write(shard, shard.stat().st_size)
            os.utime(shard, ns=(0, 1))

    for stamps in ({shard: FileStamp.of(shard.stat())}, {}):
        with pytest.raises(CheckpointError, match=r"/s: changed since it was checked \(written to, same size\)"):
            fill(replace(plan, stamps=stamps), empty(plan), None, write_again, Reading(backend))
        os.utime(shard)


def test_residency_is_told_by_both_of_the_kernels_answers(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write(path, 64 * PAGE)
    with path.open("rb") as file:
        fd = file.fileno()
        os.fsync(fd)
        assert resident_bytes(fd, [(0, 64 * PAGE), (10, 20)]) == 64 * PAGE + 10
        assert _by_cachestat(fd, 0, 64 * PAGE) in (64, None)
        assert _by_mincore(fd, 0, 64 * PAGE) == 64
        os.posix_fadvise(fd, 0, 32 * PAGE, os.POSIX_FADV_DONTNEED)
        left = _by_mincore(fd, 0, 64 * PAGE)
        assert left in (32, 64)  # 64 where the file lies in memory
        assert resident_bytes(fd, [(0, 64 * PAGE)]) == left * PAGE


def test_a_kernel_that_does_not_say_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **named: Any) -> None:
        raise OSError(errno.ENODEV, "No such device")

    path = tmp_path / "s"
    write(path, 2 * PAGE)
    monkeypatch.setattr(residency, "_by_cachestat", lambda fd, begin, end: None)
    with path.open("rb") as file:
        # Cut short between a look at its size and the mapping.
        assert residency._mapped_pages(file.fileno(), 0, 4 * PAGE) == 0
        monkeypatch.setattr(residency.mmap, "mmap", refused)
        assert resident_bytes(file.fileno(), [(0, 2 * PAGE)]) == 0


def test_what_a_reader_may_take() -> None:
    cases = ((None, 2, 100), (None, 64, 100), (16, 2, 100), (16, 2, 3), (None, 2, 0))
    assert [threads_for(*case) for case in cases] == [2, 8, 16, 3, 1]
    assert [ring_buffers(4, usable) for usable in (None, 100 * GIB, 8 * 3 * BUFFER_BYTES, MIB)] == [6, 6, 3, 2]
    assert bypasses_cache(100, 0, 99)
    assert not bypasses_cache(100, 0, 100)
    assert not bypasses_cache(100, 50, 10)
    assert not bypasses_cache(100, 0, None)


def test_ranges_are_merged(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    places = [(one, 0, 10), (one, 10, 30), (one, 31, 40), (two, 0, 5)]
    items = [ReadItem(shard, begin, end, "t", 0) for shard, begin, end in places]
    assert ranges_of(items) == {one: ((0, 30), (31, 40)), two: ((0, 5),)}
