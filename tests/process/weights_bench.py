"""How fast weights reach host memory, beside other ways to get them there. A program for ``scripts/bench``.

``reader``: ours beside safetensors' mapping, tensor by tensor in the order of the file, into memory that was touched:
warm, and cold; cold beside the disk alone, too. ``shared-file``: three stages on one cold file, each its own ranges,
beside each reading everything. ``prefetch``: a stage that waits three seconds for a lock, with its file fetched
meanwhile and without.

One file of random bytes in a temporary directory, removed in the end. Cold means: written back, dropped from the page
cache, and found not to be there. Ways take turns in a random order; a pause lets a throttled disk recover. Every
line gives the ratio of the medians, then min, median and max in seconds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stagelaunch.core.reading import Backend, Reading
from stagelaunch.core.units import GIB, MIB, format_size, parse_size
from stagelaunch.supervisor.prefetch import Prefetch
from stagelaunch.weights.files import ALIGNMENT
from stagelaunch.weights.plan import ReadItem, TargetSpec, WeightPlan
from stagelaunch.weights.reader import fill
from stagelaunch.weights.residency import resident_bytes

SHARES = {"thinker": 900, "talker": 94, "code2wav": 6}
"""Thousandths of the file that each stage reads; those of Qwen3-Omni-30B."""
TENSOR_BYTES = 4 * MIB
DISK_STEP_BYTES = 8 * MIB
DISK_THREADS = 4
DISK_ALL, DISK_SMALL = "the disk alone: the file once", "the disk alone: code2wav's part"
LOCK_WAIT_S = 3.0

Tensors = dict[str, torch.Tensor]
Way = Callable[[], object]


def write_file(path: Path, size_bytes: int) -> None:
    """A safetensors file of one tensor after the other, on the disk and not only in the cache."""
    header: dict[str, Any] = {}
    position = 0
    for stage, share in SHARES.items():
        left = size_bytes * share // 1000 // 4096 * 4096
        while left:
            length = min(left, TENSOR_BYTES)
            offsets = [position, position + length]
            header[f"{stage}.{position:012}"] = {"dtype": "U8", "shape": [length], "data_offsets": offsets}
            position += length
            left -= length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        block = os.urandom(16 * MIB)
        for start in range(0, position, len(block)):
            file.write(block[: position - start])
        file.flush()
        os.fsync(file.fileno())


def plan_of(path: Path, stages: Sequence[str] = tuple(SHARES)) -> WeightPlan:
    """What the stages read of the file, as float32: no matter to the reader."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    items, targets = [], {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if name.partition(".")[0] in stages:
            items.append(ReadItem(path, begin, end, name, 0, name))
            targets[name] = TargetSpec(((end - begin) // 4,), "float32")
    return WeightPlan("bench", tuple(items), targets, sum(item.num_bytes for item in items))


def touched(plan: WeightPlan) -> Tensors:
    return {name: torch.ones(spec.shape) for name, spec in plan.targets.items()}


def make_cold(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        left = resident_bytes(fd, [(0, size)])
        assert left < size // 100, f"{left} of {size} bytes are still in the page cache"
    finally:
        os.close(fd)


def ours(plan: WeightPlan, tensors: Tensors, reading: Reading) -> None:
    fill(plan, tensors, None, lambda done, total: None, reading)


def by_mapping(plan: WeightPlan, tensors: Tensors) -> None:
    """safetensors, as everybody uses it: its mapping, copied tensor by tensor."""
    with safe_open(str(plan.items[0].shard), framework="pt") as file:
        for name, tensor in tensors.items():
            tensor.view(torch.uint8).copy_(file.get_tensor(name))


def the_disk(path: Path, begin: int, end: int) -> None:
    """These bytes once, around the page cache, kept nowhere: what no reader can beat."""

    buffers = threading.local()

    def touch() -> None:
        buffers.own = mmap.mmap(-1, DISK_STEP_BYTES)
        buffers.own.write(bytes(DISK_STEP_BYTES))

    def read(offset: int) -> None:
        os.preadv(fd, [buffers.own], offset)

    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(DISK_THREADS, initializer=touch) as crew:
            list(crew.map(read, range(begin // ALIGNMENT * ALIGNMENT, end, DISK_STEP_BYTES)))
    finally:
        os.close(fd)


def measure(ways: Mapping[str, Way], rounds: int, before: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of each way, round by round in a random order."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            before()
            began_s = time.perf_counter()
            ways[name]()
            took[name].append(time.perf_counter() - began_s)
    return took


def show(took: Mapping[str, Sequence[float]], base: str, target: str = "", *, faster: bool = False) -> None:
    """``faster``: how many times faster than the base; else which part of its time."""
    base_s = statistics.median(took[base])
    for name, seconds in took.items():
        median_s = statistics.median(seconds)
        ratio = base_s / median_s if faster else median_s / base_s
        wanted = f"  ({target})" if target and name != base and "ours" in name else ""
        print(f"  {name:<44} {ratio:7.3f}   {min(seconds):.3f} {median_s:.3f} {max(seconds):.3f}{wanted}", flush=True)


def bench_reader(path: Path, rounds: int, pause_s: float) -> None:
    plan = plan_of(path)
    tensors = touched(plan)

    def without_threads() -> None:
        given = torch.get_num_threads()
        torch.set_num_threads(1)
        by_mapping(plan, tensors)
        torch.set_num_threads(given)

    mapped = f"safetensors' mapping, torch on {torch.get_num_threads()} threads"
    one, auto = Reading(Backend.BUFFERED, 1), Reading()
    ways: dict[str, Way] = {
        "safetensors' mapping, torch on 1 thread": without_threads,
        mapped: lambda: by_mapping(plan, tensors),
        "ours, 1 thread": lambda: ours(plan, tensors, one),
        "ours": lambda: ours(plan, tensors, auto),
    }
    by_mapping(plan, tensors)
    print("warm, into touched memory: times faster than safetensors")
    show(measure(ways, rounds, lambda: None), next(iter(ways)), "target 1.2", faster=True)

    def cold() -> None:
        time.sleep(pause_s)
        make_cold(path)

    ways.pop(mapped)
    ways["ours, 4 threads"] = lambda: ours(plan, tensors, Reading(Backend.BUFFERED, 4))
    ways["the disk alone, nothing kept"] = lambda: the_disk(path, 0, path.stat().st_size)
    ways["ours, direct, 2 threads"] = lambda: ours(plan, tensors, Reading(Backend.DIRECT, 2))
    print("cold: times faster than safetensors")
    show(measure(ways, rounds, cold), next(iter(ways)), "target 2", faster=True)


def child(path: Path, stage: str, way: str) -> None:
    """One stage of three: says that it can begin, waits, reads, says that it is done."""
    wanted = plan_of(path, [stage])
    plan = plan_of(path) if way == "everything, direct" else wanted
    tensors = touched(plan)
    print("can begin", flush=True)
    sys.stdin.readline()
    before = fetched_bytes()
    match way:
        case "own ranges":
            ours(plan, tensors, Reading())
        case "everything, direct":
            ours(plan, tensors, Reading(Backend.DIRECT, 1))
        case _:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_tensor(name)
                    tensors[name].view(torch.uint8).copy_(tensor) if name in tensors else tensor.clone()
    print(f"done {fetched_bytes() - before}", flush=True)


def fetched_bytes() -> int:
    """What this process has had fetched from disks so far, readahead included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def three_stages(path: Path, way: str, pause_s: float) -> tuple[dict[str, float], int]:
    """When each of the three had what it needs, in seconds from the moment they all could begin; the bytes that were
    fetched from the disk for that, by all."""
    command = [sys.executable, __file__, "child", "--file", str(path), "--way", way, "--stage"]
    children = {
        stage: subprocess.Popen([*command, stage], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for stage in SHARES
    }
    for process in children.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "can begin\n"
    time.sleep(pause_s)
    make_cold(path)
    began_s = time.perf_counter()
    for process in children.values():
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ready, fetched = {}, 0
    for stage in reversed(SHARES):
        stdout = children[stage].stdout
        assert stdout is not None
        word, _, count = stdout.readline().partition(" ")
        assert word == "done"
        ready[stage] = time.perf_counter() - began_s
        fetched += int(count)
    for process in children.values():
        process.communicate()
    return ready, fetched


def bench_shared_file(path: Path, rounds: int, pause_s: float) -> None:
    fetched: dict[str, int] = {}
    all_ready: dict[str, list[float]] = {}
    small_ready: dict[str, list[float]] = {}
    names = {"everything, direct": "each everything, around the cache", "everything": "each everything, by safetensors",
             "own ranges": "ours: each its own ranges"}  # fmt: skip
    for _ in range(rounds):
        for way in random.sample(list(names), len(names)):
            ready, fetched[names[way]] = three_stages(path, way, pause_s)
            all_ready.setdefault(names[way], []).append(max(ready.values()))
            small_ready.setdefault(names[way], []).append(ready["code2wav"])
        for name, times, share in ((DISK_ALL, all_ready, 1000), (DISK_SMALL, small_ready, SHARES["code2wav"])):
            time.sleep(pause_s)
            make_cold(path)
            began_s = time.perf_counter()
            size = path.stat().st_size
            the_disk(path, size - size * share // 1000, size)
            times.setdefault(name, []).append(time.perf_counter() - began_s)
    base = names["everything, direct"]
    print("until all three are ready: part of the first")
    show({name: all_ready[name] for name in (*names.values(), DISK_ALL)}, base, "target 0.15")
    print("until code2wav is ready: part of the first's whole")
    small = {"ours: code2wav": small_ready[names["own ranges"]], DISK_SMALL: small_ready[DISK_SMALL]}
    show({base: all_ready[base], **small}, base, "target 0.01")
    print("fetched from the disk: times the file's size, in the last round")
    for name, count in fetched.items():
        print(f"  {name:<44} {count / path.stat().st_size:7.3f}")


def bench_prefetch(path: Path, rounds: int, pause_s: float) -> None:
    plan = plan_of(path)
    tensors = touched(plan)
    fetched: list[int] = []

    def load(*, with_prefetch: bool) -> float:
        time.sleep(pause_s)
        make_cold(path)
        prefetch = Prefetch([(path, item.begin, item.end) for item in plan.items], lambda: 1 << 50)
        if with_prefetch:
            prefetch.start()
        time.sleep(LOCK_WAIT_S)
        prefetch.stop()
        fetched.append(prefetch.fetched_bytes)
        began_s = time.perf_counter()
        ours(plan, tensors, Reading())
        return time.perf_counter() - began_s

    took: dict[str, list[float]] = {"without prefetch": [], "ours, with prefetch": []}
    for _ in range(rounds):
        took["without prefetch"].append(load(with_prefetch=False))
        took["ours, with prefetch"].append(load(with_prefetch=True))
    print(f"load after {LOCK_WAIT_S:.0f} s of waiting: part of the first")
    show(took, "without prefetch", "target 0.25")
    print(f"  fetched while it waited, at most: {format_size(max(fetched))}")


BENCHES = {"reader": bench_reader, "shared-file": bench_shared_file, "prefetch": bench_prefetch}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("bench", choices=(*BENCHES, "child"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=parse_size, default=GIB, help="of the file, at most 3GiB")
    parser.add_argument("--pause", type=float, default=1.0, metavar="SECONDS", help="before each cold read")
    parser.add_argument("--dir", type=Path, help="where the file is written; a disk, not tmpfs")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", choices=SHARES, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bench == "child":
        torch.set_num_threads(1)
        child(args.file, args.stage, args.way)
        return 0
    if args.size > 3 * GIB:
        parser.error("--size is at most 3GiB")
    with tempfile.TemporaryDirectory(prefix="stagelaunch-bench-", dir=args.dir) as directory:
        path = Path(directory) / "model.safetensors"
        write_file(path, args.size)
        print(f"scripts/bench {args.bench} --rounds {args.rounds} --size {args.size}: {format_size(args.size)}, "
              f"{os.cpu_count()} CPUs; ratio, then min median max in seconds")  # fmt: skip
        BENCHES[args.bench](path, args.rounds, args.pause)
    return 0


if __name__ == "__main__":
    sys.exit(main())
