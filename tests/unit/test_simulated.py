"""What only a simulated device can promise: exact bytes, exact texts, injected errors."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices import simgraph
from stagelaunch.devices.base import MemoryStats
from stagelaunch.devices.factory import open_device
from stagelaunch.devices.simfile import SimulatedFile
from stagelaunch.devices.simmemory import ActivationTracker
from stagelaunch.devices.simulated import SimulatedDevice

KIB, MIB = 1024, 1024**2
SEGMENT = 2 * MIB
CONTEXT = 10 * MIB
torch.set_num_threads(1)


@pytest.fixture
def machine(tmp_path):
    return SimulatedMachine(tmp_path / "devices", {0: 64 * MIB, 1: 32 * MIB}, CONTEXT)


@pytest.fixture
def device(machine):
    opened = SimulatedDevice(machine, 0)
    opened.create_context()
    yield opened
    opened.close()


@pytest.fixture
def outside(machine):
    file = SimulatedFile.open(machine)
    yield file
    file.close()


def stats(allocated: int, reserved: int, peak_allocated: int, peak: int) -> MemoryStats:
    return MemoryStats(allocated, reserved, peak_allocated, peak)


def test_the_factory_opens_by_uuid(machine):
    device = open_device("simulated", machine.uuid(1), machine)
    assert (device.uuid, device.total_bytes()) == (machine.uuid(1), 32 * MIB)
    device.close()
    with pytest.raises(NoDeviceError, match=rf"cannot open device GPU-1: .*name one of {machine.uuid(0)}"):
        open_device("simulated", "GPU-1", machine)
    with pytest.raises(ValueError, match="backend 'rocm'"):
        open_device("rocm", "GPU-1", machine)
    if not torch.cuda.is_available():
        with pytest.raises(NoDeviceError, match="torch sees no CUDA device; install"):
            open_device("cuda", "GPU-1", None)


def test_the_context_is_charged_once_and_unknown_before(machine):
    device = SimulatedDevice(machine, 0)
    assert device.process_bytes() is None
    with pytest.raises(RuntimeError, match="has no context; call create_context"):
        device.empty((1,), torch.uint8)
    with pytest.raises(RuntimeError, match="has no context"):
        device.compute()
    device.create_context()
    device.create_context()
    assert device.process_bytes() == CONTEXT
    assert device.free_bytes() == 64 * MIB - CONTEXT
    device.close()


def test_a_context_without_room_is_out_of_memory(machine, outside):
    outside.set_foreign_bytes(0, 64 * MIB - CONTEXT + 1)
    device = SimulatedDevice(machine, 0)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 10\.00 MiB"):
        device.create_context()
    assert device.process_bytes() is None
    device.close()


def test_bytes_are_exact_and_segments_whole(device):
    a = device.empty((3,), torch.uint8)
    assert device.memory() == stats(3, SEGMENT, 3, SEGMENT)
    b = device.empty((SEGMENT - 3,), torch.uint8)
    assert device.memory() == stats(SEGMENT, SEGMENT, SEGMENT, SEGMENT)
    c = device.empty((1,), torch.bfloat16)
    assert device.memory() == stats(SEGMENT + 2, 2 * SEGMENT, SEGMENT + 2, 2 * SEGMENT)
    assert device.process_bytes() == CONTEXT + 2 * SEGMENT
    del b
    assert device.memory() == stats(5, 2 * SEGMENT, SEGMENT + 2, 2 * SEGMENT)
    device.empty_cache()
    assert device.memory() == stats(5, SEGMENT, SEGMENT + 2, 2 * SEGMENT)
    assert device.process_bytes() == CONTEXT + SEGMENT
    del a, c
    device.empty_cache()
    assert device.process_bytes() == CONTEXT


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda tensor: tensor.view(-1)[5:], id="view"),
        pytest.param(lambda tensor: torch.nn.Parameter(tensor, requires_grad=False), id="parameter"),
        pytest.param(lambda tensor: torch.nn.Parameter(tensor.detach()), id="parameter of a detached one"),
        pytest.param(lambda tensor: tensor.untyped_storage(), id="storage"),
        pytest.param(lambda tensor: [tensor.T], id="in a list"),
    ],
)
def test_a_tensor_is_charged_as_long_as_anything_holds_its_storage(device, wrap):
    held = wrap(device.empty((KIB, KIB), torch.float32))
    assert device.memory().allocated_bytes == 4 * MIB
    del held
    assert device.memory().allocated_bytes == 0


def test_a_cycle_is_charged_until_the_collector_finds_it(device):
    holder = [device.empty((KIB,), torch.uint8)]
    holder.append(holder)
    del holder
    gc.collect()
    assert device.memory().allocated_bytes == 0


def test_the_last_byte_can_be_had_and_the_next_cannot(device, outside):
    room = 64 * MIB - CONTEXT
    tensor = device.empty((room,), torch.uint8)
    assert (device.free_bytes(), outside.free_bytes(0)) == (0, 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.empty((1,), torch.uint8)
    text = str(caught.value)
    assert "CUDA out of memory. Tried to allocate 1 B. Simulated device 0 has a total capacity of 64.00 MiB" in text
    assert "of which 0 B is free" in text
    assert "has 64.00 MiB memory in use" in text
    assert "54.00 MiB is allocated by tensors and graphs, and 0 B is reserved but unallocated" in text
    del tensor
    device.empty_cache()
    assert outside.free_bytes(0) == room


def test_the_cache_is_given_back_before_giving_up(device, outside):
    del_me = device.empty((20 * MIB,), torch.uint8)
    del del_me
    outside.set_foreign_bytes(0, 30 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        device.empty((25 * MIB,), torch.uint8)
    assert device.memory().reserved_bytes == 0
    assert device.free_bytes() == 24 * MIB
    assert device.empty((24 * MIB,), torch.uint8).nbytes == 24 * MIB


def test_activations_out_of_memory_leave_nothing_charged(device):
    x = device.empty((MIB,), torch.float32)
    with device.compute(), pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 64\.00 MiB"):
        x.repeat(16)
    assert device.memory().allocated_bytes == 4 * MIB


def test_two_processes_share_the_capacity(machine, device):
    other = SimulatedDevice(machine, 0)
    other.create_context()
    tensor = other.empty((40 * MIB,), torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        device.empty((6 * MIB,), torch.uint8)
    assert tensor.nbytes == 40 * MIB
    other.close()
    assert device.empty((6 * MIB,), torch.uint8).nbytes == 6 * MIB


def test_closing_gives_everything_back_while_tensors_are_alive(machine, outside):
    device = SimulatedDevice(machine, 0)
    device.create_context()
    tensor = device.empty((MIB,), torch.uint8)
    device.close()
    assert outside.free_bytes(0) == 64 * MIB
    del tensor
    device.close()
    with pytest.raises(RuntimeError, match="is closed"):
        device.empty((MIB,), torch.uint8)


# Activations


def test_only_new_storage_is_charged_and_only_while_it_lives(device):
    x = device.empty((KIB, KIB), torch.uint8).zero_()
    host = torch.zeros(KIB, KIB, dtype=torch.uint8)
    allocated = []

    def note() -> None:
        allocated.append(device.memory().allocated_bytes - MIB)

    with device.compute():
        y = x + 1
        note()
        y.add_(1)
        x.add_(1)
        views = [y.T, y[3:], y.view(-1), x[0], host[0], host.view(-1)]
        note()
        torch.add(x, 1, out=y)
        host.add_(1)
        note()
        parts = y.split(512)
        note()
        z = torch.empty_like(x)
        note()
        del views, parts, y
        note()
    assert allocated == [MIB, MIB, MIB, MIB, 2 * MIB, MIB]
    # What leaves the block stays charged.
    assert device.memory().allocated_bytes == 2 * MIB
    del z
    assert device.memory().allocated_bytes == MIB


def test_nested_compute_charges_once_and_empty_inside_is_resident(device):
    with device.compute():
        with device.compute():
            x = device.empty((KIB,), torch.uint8)
            y = x + x
        assert device.memory().allocated_bytes == 2 * KIB
        assert y.shape == x.shape


def test_a_meta_tensor_costs_nothing(device):
    with device.compute():
        ghost = torch.empty(1 << 40, device="meta")
        assert ghost.view(2, -1).device.type == "meta"
        assert device.memory().allocated_bytes == 0


@pytest.mark.parametrize("mode", [ActivationTracker, simgraph._Recorder])
def test_watching_operators_does_not_import_the_compiler(mode):
    # torch wraps the method of a mode that it wants to keep from its compiler, which the wrapper imports: seconds.
    assert not hasattr(mode.__torch_dispatch__, "__wrapped__")


class Block(torch.nn.Module):
    """Attention and an MLP, as a decoder layer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(128, 384)
        self.up = torch.nn.Linear(128, 512)
        self.down = torch.nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(256, 4, 32).transpose(0, 1) for part in self.qkv(x).chunk(3, -1))
        x = x + (torch.softmax(q @ k.transpose(1, 2), -1) @ v).transpose(0, 1).reshape(256, 128)
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def profiled_peak_bytes(run) -> int:
    """The oracle: highest sum of the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, torch.no_grad():
        run()
    events = recorded.profiler.kineto_results.events()
    deltas = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    level = peak = 0
    for _, delta in sorted(deltas, key=lambda item: item[0]):
        level += delta
        peak = max(peak, level)
    return peak


def test_the_activation_peak_agrees_with_the_profiler(device):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(256, 128)
    block(x)
    expected = profiled_peak_bytes(lambda: block(x))
    with device._allocator.watch_peak() as peak_bytes, device.compute():
        block(x)
    assert expected > MIB
    assert peak_bytes() == pytest.approx(expected, abs=2 * KIB)


# Graphs


def test_a_pool_is_as_large_as_its_largest_graph_beside_the_outputs_that_live(device):
    x = device.empty((SEGMENT,), torch.uint8).zero_()
    pool = device.new_graph_pool()
    base = device.process_bytes()

    def held() -> int:
        device.empty_cache()
        return (device.process_bytes() - base) // SEGMENT

    def step(x):
        return (x + 1 + 1,)

    first = device.capture(step, (x,), pool)
    # Two intermediates at a time, the second of them is the output.
    assert held() == 2
    second = device.capture(step, (x,), pool)
    assert held() == 3
    small = device.capture(lambda x: (x.sum(),), (x,), pool)
    assert held() == 3
    output = second.outputs[0]
    del first, second, small
    third = device.capture(step, (x,), pool)
    # The output of the second is still held; the first one's place is free again.
    assert held() == 3
    del third, pool
    assert held() == 3
    del output
    assert held() == 0


def test_dropping_a_graph_frees_what_its_step_closed_over_without_the_collector(device):
    x = device.empty((KIB,), torch.uint8).zero_()

    def capture():
        cache = device.empty((SEGMENT,), torch.uint8).zero_()

        def step(x):
            cache[:KIB].add_(x)
            return (x + 1,)

        return device.capture(step, (x,), device.new_graph_pool())

    graph = capture()
    assert device.memory().allocated_bytes > SEGMENT
    gc.collect()
    gc.disable()
    try:
        del graph
        assert device.memory().allocated_bytes == KIB
    finally:
        gc.enable()


def test_a_graph_that_does_not_fit_is_out_of_memory(device, outside):
    x = device.empty((4 * MIB,), torch.uint8).zero_()
    outside.set_foreign_bytes(0, 64 * MIB - CONTEXT - 6 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        device.capture(lambda x: (x + 1,), (x,), device.new_graph_pool())
    outside.set_foreign_bytes(0, 64 * MIB - CONTEXT - 12 * MIB)
    graph = device.capture(lambda x: (x + 1,), (x,), device.new_graph_pool())
    assert device.process_bytes() == CONTEXT + 12 * MIB
    graph.replay()


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (lambda x: (x * x.sum().item(),), "_local_scalar_dense"),
        (lambda x: (x.nonzero(),), "nonzero"),
        (lambda x: (x.tolist(), x)[1:], "tolist"),
    ],
)
def test_what_cannot_be_captured_is_named(device, step, cause):
    x = device.empty((4,), torch.float32).zero_()
    with pytest.raises(RuntimeError, match=rf"cannot capture the step: .*{cause}.*on the host .*torch\.where"):
        device.capture(step, (x,), device.new_graph_pool())


def test_a_constant_written_down_in_the_step_has_its_value_in_every_replay(device):
    x = device.empty((1,), torch.float32).zero_()

    def step(x):
        start = torch.tensor([3.0])
        start.add_(x)
        return (start,)

    graph = device.capture(step, (x,), device.new_graph_pool())
    x.fill_(1)
    for _ in range(2):
        graph.replay()
        assert graph.outputs[0].tolist() == [4.0]


def test_what_only_reshapes_is_not_replayed(device):
    x = device.empty((4, 2), torch.float32).zero_()

    def step(x):
        y = x + 1
        y.unsqueeze_(0)
        return (y.view(-1)[1:],)

    graph = device.capture(step, (x,), device.new_graph_pool())
    assert [str(call.operator) for call in graph.calls] == ["aten.add.Tensor"]


def test_the_collector_rests_while_the_peak_is_measured(device):
    # Old garbage that died during the run would hide part of the peak.
    x = device.empty((4,), torch.float32).zero_()
    running = []

    def step(x):
        running.append(gc.isenabled())
        return (x + 1,)

    device.capture(step, (x,), device.new_graph_pool())
    assert running[0] is False
    assert gc.isenabled()


def test_indexing_with_numbers_can_be_captured(device):
    x = device.empty((4, 4), torch.float32).zero_()
    index = device.empty((2,), torch.int64).zero_()

    def step(x, index):
        x[index] = 3.0
        return x[index], torch.repeat_interleave(index, index * 0 + 2, output_size=4)

    graph = device.capture(step, (x, index), device.new_graph_pool())
    index.fill_(2)
    graph.replay()
    assert graph.outputs[0].tolist() == [[3.0] * 4] * 2


def test_a_step_must_return_a_tuple_of_tensors_and_the_pool_be_the_devices(machine, device):
    x = device.empty((4,), torch.float32).zero_()
    with pytest.raises(TypeError, match="return a tuple of tensors"):
        device.capture(lambda x: x, (x,), device.new_graph_pool())
    other = SimulatedDevice(machine, 1)
    other.create_context()
    with pytest.raises(TypeError, match="not of this device"):
        device.capture(lambda x: (x,), (x,), other.new_graph_pool())
    other.close()


def test_a_failing_recording_undoes_what_it_wrote(device):
    count = device.empty((1,), torch.float32).zero_()

    def step(x):
        count.add_(1)
        return (x.nonzero(),)

    with pytest.raises(RuntimeError):
        device.capture(step, (count,), device.new_graph_pool())
    assert count.tolist() == [1]


# Errors and rates


def test_an_injected_error_breaks_every_call_until_it_is_repaired(device, outside):
    x = device.empty((4,), torch.float32).zero_()
    pool = device.new_graph_pool()
    graph = device.capture(lambda x: (x + 1,), (x,), pool)
    outside.set_error(0, 700)
    calls = [
        device.create_context,
        device.total_bytes,
        device.free_bytes,
        device.process_bytes,
        device.empty_cache,
        device.synchronize,
        lambda: device.empty((1,), torch.uint8),
        device.compute,
        device.new_graph_pool,
        lambda: device.capture(lambda x: (x,), (x,), pool),
        graph.replay,
        lambda: device.copy_from_host(x, torch.zeros(4)),
    ]
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"CUDA error: an illegal memory access.*injected into simulated device 0"
        ):
            call()
    outside.set_error(0, 4711)
    with pytest.raises(RuntimeError, match="unknown error 4711"):
        device.synchronize()
    outside.set_error(0, 0)
    graph.replay()


def test_a_copy_that_does_not_match_is_refused(device):
    target = device.empty((4,), torch.float32).zero_()
    for source in (torch.ones(1), torch.ones(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="shapes and dtypes differ; convert"):
            device.copy_from_host(target, source)
    assert target.tolist() == [0] * 4


def test_copies_keep_to_the_transfer_rate(machine):
    slow = SimulatedMachine(machine.path, machine.total_bytes, CONTEXT, transfer_bytes_per_s=50 * MIB)
    device = SimulatedDevice(slow, 0)
    device.create_context()
    target = device.empty((5 * MIB,), torch.uint8)
    started_s = time.monotonic()
    device.copy_from_host(target, torch.ones(5 * MIB, dtype=torch.uint8))
    assert 0.1 <= time.monotonic() - started_s < 5
    device.close()


def test_recording_puts_back_rows_that_a_step_writes_more_than_once(device):
    cache = device.empty((4, 2), torch.float32)
    cache.copy_(torch.arange(8.0).view(4, 2))
    before = cache.clone()
    step_input = device.empty((2, 2), torch.float32)
    step_input.fill_(7.0)
    first, second = torch.tensor([1, 1]), torch.tensor([0, 3])

    def step(values):
        cache.index_copy_(0, first, values)
        cache.mul_(2.0)
        cache.index_copy_(0, second, values)
        return (cache + 0.0,)

    def eager_once(start):
        expected = start.clone()
        expected.index_copy_(0, first, step_input)
        expected.mul_(2.0)
        return expected.index_copy_(0, second, step_input)

    graph = device.capture(step, (step_input,), device.new_graph_pool())
    # As on a device: the warm-up run writes, the recording does not.
    assert torch.equal(cache, eager_once(before))
    graph.replay()
    assert torch.equal(cache, eager_once(eager_once(before)))


def test_recording_a_write_of_a_few_rows_does_not_copy_the_whole_cache(device, monkeypatch):
    cache = device.empty((1000, 8), torch.float32)
    step_input = device.empty((1, 8), torch.float32)
    copied = []
    real = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda self: copied.append(self.nbytes()) or real(self))
    row = torch.tensor([5])
    device.capture(
        lambda values: (cache.index_copy_(0, row, values)[5:6] + 0.0,), (step_input,), device.new_graph_pool()
    )
    assert sum(copied) < cache.nbytes
