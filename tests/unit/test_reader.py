"""Bytes reach their place, in few reads and copies, and a file that fails under the reader is a clean error."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import pytest
import torch

from stagelaunch.core.errors import CheckpointError
from stagelaunch.core.reading import Backend, Reading
from stagelaunch.devices.upload import HostUploader, Uploader
from stagelaunch.weights import reader
from stagelaunch.weights.index import read_index
from stagelaunch.weights.plan import ITEM_BYTES, ReadItem, TargetSpec, WeightPlan, plan_component
from stagelaunch.weights.reader import fill
from stagelaunch.weights.reads import MAX_BUFFERS


def quiet(done: int, total: int) -> None:
    """No progress wanted."""


def write(path: Path, size: int) -> bytes:
    content = bytes((7 * position + position // 251) % 256 for position in range(size))
    path.write_bytes(content)
    return content


def plan_of(items: Sequence[ReadItem], **targets: TargetSpec) -> WeightPlan:
    ordered = tuple(sorted(items, key=lambda item: (item.shard, item.begin)))
    return WeightPlan("test", ordered, targets, sum(item.num_bytes for item in ordered))


def empty(plan: WeightPlan) -> dict[str, torch.Tensor]:
    return {
        name: torch.full((prod(spec.shape) * ITEM_BYTES[spec.dtype],), 0xFF, dtype=torch.uint8)
        .view(getattr(torch, spec.dtype))
        .view(spec.shape)
        for name, spec in plan.targets.items()
    }


def content_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def two_shards(tmp_path: Path) -> tuple[WeightPlan, dict[str, bytes]]:
    """Two targets interleaved in one shard with a gap, a third whose halves lie in both. Float32 all."""
    one, two = tmp_path / "one", tmp_path / "two"
    first, second = write(one, 1000), write(two, 500)
    plan = plan_of(
        [
            ReadItem(one, 100, 300, "a", 0),
            ReadItem(one, 300, 420, "b", 120),
            ReadItem(one, 420, 540, "b", 0),
            ReadItem(one, 700, 1000, "c", 0),
            ReadItem(two, 0, 100, "c", 300),
        ],
        a=TargetSpec((5, 10), "float32"),
        b=TargetSpec((2, 30), "float32"),
        c=TargetSpec((100,), "float32"),
    )
    expected = {"a": first[100:300], "b": first[420:540] + first[300:420], "c": first[700:1000] + second[:100]}
    return plan, expected


@pytest.mark.parametrize("uploader", [None, HostUploader()], ids=["in place", "ring"])
@pytest.mark.parametrize("chunk", [4, 64, 100, 8 << 20])
def test_every_byte_reaches_its_place(
    two_shards: tuple[WeightPlan, dict[str, bytes]],
    uploader: Uploader | None,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(reader, "BUFFER_BYTES", chunk)
    plan, expected = two_shards
    tensors = empty(plan)
    fill(plan, tensors, uploader, quiet)
    assert {name: content_of(tensor) for name, tensor in tensors.items()} == expected


@pytest.mark.parametrize("uploader", [None, HostUploader()], ids=["in place", "ring"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path: Path, uploader: Uploader | None, dtype: str) -> None:
    content = write(tmp_path / "s", 60)
    plan = plan_of([ReadItem(tmp_path / "s", 20, 60, "t", 0)], t=TargetSpec((4, 5), dtype))
    tensors = empty(plan)
    fill(plan, tensors, uploader, quiet)
    assert content_of(tensors["t"]) == content[20:]


def test_parameters_that_want_gradients_and_scalars(tmp_path: Path) -> None:
    content = write(tmp_path / "s", 4)
    plan = plan_of([ReadItem(tmp_path / "s", 0, 4, "t", 0)], t=TargetSpec((), "float32"))
    parameter = torch.nn.Parameter(torch.zeros(()))
    fill(plan, {"t": parameter}, None, quiet)
    assert content_of(parameter.detach()) == content


def test_short_reads_are_continued(
    two_shards: tuple[WeightPlan, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may deliver less than asked, and stop in the middle of any buffer."""
    preadv, calls = os.preadv, []

    def stingy(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return preadv(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    plan, expected = two_shards
    tensors = empty(plan)
    fill(plan, tensors, None, quiet)
    assert {name: content_of(tensor) for name, tensor in tensors.items()} == expected
    assert len(calls) > plan.total_bytes // 7


def test_short_reads_over_several_buffers_are_continued(
    two_shards: tuple[WeightPlan, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        total, kept = 0, []
        for buffer in buffers:
            kept.append(buffer[: 250 - total])
            total += len(kept[-1])
        return preadv(fd, [buffer for buffer in kept if buffer], offset)

    monkeypatch.setattr(os, "preadv", short)
    plan, expected = two_shards
    tensors = empty(plan)
    fill(plan, tensors, None, quiet)
    assert {name: content_of(tensor) for name, tensor in tensors.items()} == expected


def test_neighbours_are_read_in_one_call(
    two_shards: tuple[WeightPlan, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, calls = os.preadv, []

    def recording(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append((offset, [len(buffer) for buffer in buffers]))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", recording)
    fill(two_shards[0], empty(two_shards[0]), None, quiet)
    assert calls == [(100, [200, 120, 120]), (700, [300]), (0, [100])]


def test_a_call_has_no_more_buffers_than_the_kernel_takes(tmp_path: Path) -> None:
    count = 2 * MAX_BUFFERS + 5
    content = write(tmp_path / "s", 4 * count)
    plan = plan_of(
        [ReadItem(tmp_path / "s", 4 * n, 4 * n + 4, f"t{n}", 0) for n in range(count)],
        **{f"t{n}": TargetSpec((1,), "float32") for n in range(count)},
    )
    tensors = empty(plan)
    fill(plan, tensors, None, quiet)
    assert b"".join(content_of(tensors[f"t{n}"]) for n in range(count)) == content


def test_staged_neighbours_are_one_copy(tmp_path: Path) -> None:
    """An expert's gate and up lie side by side in the file and in the slab."""
    content = write(tmp_path / "s", 48)
    plan = plan_of(
        [
            ReadItem(tmp_path / "s", 0, 16, "slab", 0),
            ReadItem(tmp_path / "s", 16, 32, "slab", 16),
            ReadItem(tmp_path / "s", 32, 48, "other", 0),
        ],
        slab=TargetSpec((2, 4), "float32"),
        other=TargetSpec((4,), "float32"),
    )
    tensors = empty(plan)
    copies: list[int] = []

    def copy(target: torch.Tensor, host: torch.Tensor) -> None:
        assert (target.shape, target.dtype) == (host.shape, host.dtype)
        copies.append(target.numel())
        target.copy_(host)

    fill(plan, tensors, HostUploader(copy), quiet)
    assert copies == [32, 16]
    assert content_of(tensors["slab"]) + content_of(tensors["other"]) == content


@pytest.mark.parametrize("uploader", [None, HostUploader()], ids=["in place", "ring"])
def test_progress_grows_to_the_total_at_a_bounded_rate(tiny_checkpoint: Path, uploader: Uploader | None) -> None:
    plan = plan_component(read_index(tiny_checkpoint), "thinker")
    seen: list[tuple[int, int]] = []
    fill(plan, empty(plan), uploader, lambda done, total: seen.append((done, total)))
    counts = [done for done, _ in seen]
    assert counts[0] == 0
    assert counts[-1] == plan.total_bytes
    assert counts == sorted(set(counts))
    assert {total for _, total in seen} == {plan.total_bytes}
    assert 3 < len(seen) <= 102


def test_progress_does_not_flood(tmp_path: Path) -> None:
    """A thousand reads of a few bytes are no thousand reports."""
    write(tmp_path / "s", 16_000)
    plan = plan_of(
        [ReadItem(tmp_path / "s", 16 * n, 16 * n + 8, "t", 8 * n) for n in range(1000)],
        t=TargetSpec((2000,), "float32"),
    )
    seen: list[int] = []
    fill(plan, empty(plan), None, lambda done, total: seen.append(done))
    assert seen == [0, 8000]


@pytest.mark.parametrize("uploader", [None, HostUploader()], ids=["in place", "ring"])
def test_a_file_cut_short_since_it_was_checked(
    two_shards: tuple[WeightPlan, dict[str, bytes]], uploader: Uploader | None
) -> None:
    plan, _ = two_shards
    shard = plan.items[0].shard
    os.truncate(shard, 750)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match=f"{shard}: ends at byte 750, 250 bytes early"):
        fill(plan, empty(plan), uploader, quiet)
    assert os.listdir("/proc/self/fd") == before


def test_a_file_removed_since_it_was_checked(two_shards: tuple[WeightPlan, dict[str, bytes]]) -> None:
    plan, _ = two_shards
    plan.items[-1].shard.unlink()
    with pytest.raises(CheckpointError, match="two: cannot be opened: No such file"):
        fill(plan, empty(plan), None, quiet)


def test_a_disk_that_fails(two_shards: tuple[WeightPlan, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 700:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match="one: cannot be read at byte 700: Input/output error"):
        fill(two_shards[0], empty(two_shards[0]), None, quiet)
    assert os.listdir("/proc/self/fd") == before


def test_a_file_that_is_gone_while_it_is_open(
    two_shards: tuple[WeightPlan, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fstat, asked, last = os.fstat, list[int](), 0
    before = os.listdir("/proc/self/fd")

    def failing(fd: int) -> os.stat_result:
        asked.append(fd)
        if len(asked) == last:
            raise OSError(116, "Stale file handle")
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", failing)
    # Looked at when it is opened, and again when everything is read.
    for nth, name in ((1, "one"), (4, "two")):
        asked.clear()
        last = nth
        with pytest.raises(CheckpointError, match=f"{name}: cannot be looked at: Stale file handle"):
            fill(two_shards[0], empty(two_shards[0]), HostUploader(), quiet, Reading(Backend.BUFFERED))
    assert os.listdir("/proc/self/fd") == before


def test_too_few_descriptors_are_said_as_such(two_shards: tuple[WeightPlan, dict[str, bytes]]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(CheckpointError, match=r"one: cannot be opened: Too many open files; .*ulimit -n"):
            fill(two_shards[0], empty(two_shards[0]), None, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_copy_that_fails_closes_the_file(two_shards: tuple[WeightPlan, dict[str, bytes]]) -> None:
    def failing(target: torch.Tensor, host: torch.Tensor) -> None:
        raise RuntimeError("device lost")

    before = os.listdir("/proc/self/fd")
    with pytest.raises(RuntimeError, match="device lost"):
        fill(two_shards[0], empty(two_shards[0]), HostUploader(failing), quiet)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("a"), "differ in 1 names, a among them"),
        (lambda tensors: tensors.update(z=torch.zeros(1)), "differ in 1 names, z among them"),
        (lambda tensors: tensors.update(a=torch.zeros(10, 5)), r"a is torch.float32 \[10, 5\]"),
        (lambda tensors: tensors.update(a=torch.zeros(5, 10, dtype=torch.float16)), "a is torch.float16"),
        (lambda tensors: tensors.update(a=torch.zeros(10, 5).t()), "a is not contiguous"),
        (lambda tensors: tensors.update(a=torch.zeros(5, 10, device="meta")), "a is on meta"),
    ],
    ids=["missing", "besides", "shape", "dtype", "strided", "meta"],
)
def test_tensors_that_are_not_the_plans(
    two_shards: tuple[WeightPlan, dict[str, bytes]], change: Callable[[dict[str, torch.Tensor]], object], says: str
) -> None:
    tensors = empty(two_shards[0])
    change(tensors)
    with pytest.raises(ValueError, match=says):
        fill(two_shards[0], tensors, None, quiet)
