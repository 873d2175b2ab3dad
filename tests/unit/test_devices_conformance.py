"""What every device promises (``devices/base.py``), asked of each implementation. cuda is skipped without a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices.base import Device, MemoryStats
from stagelaunch.devices.factory import open_device

MIB = 1024**2
torch.set_num_threads(1)


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def fresh(request, tmp_path):
    """A device without a context."""
    if request.param == "simulated":
        machine = SimulatedMachine(tmp_path / "devices", {0: 256 * MIB, 1: 64 * MIB}, context_bytes=10 * MIB)
        opened = open_device("simulated", machine.uuid(0), machine)
    else:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        from stagelaunch.devices.inventory import list_cuda_devices

        opened = open_device("cuda", list_cuda_devices()[0].uuid, None)
    yield opened
    opened.close()


@pytest.fixture
def device(fresh: Device) -> Device:
    fresh.create_context()
    fresh.empty_cache()
    fresh.reset_peak()
    return fresh


def resident(device: Device, *shape: int, seed: int = 0) -> torch.Tensor:
    tensor = device.empty(shape, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    device.copy_from_host(tensor, torch.randn(shape, generator=generator))
    return tensor


def settled(device: Device) -> MemoryStats:
    device.synchronize()
    device.empty_cache()
    return device.memory()


def test_its_identity_is_the_one_it_was_opened_by(fresh):
    assert fresh.uuid
    assert isinstance(fresh.torch_device, torch.device)


def figure(device: Device) -> int | None:
    """What the driver says this process holds; None where it does not say."""
    return (device.process_table() or {}).get(os.getpid())


def test_a_context_costs_memory_that_the_process_is_said_to_hold(fresh):
    free_bytes, before = fresh.driver_free_bytes(), figure(fresh)
    assert not before
    fresh.create_context()
    held_bytes = figure(fresh)
    assert held_bytes is None or held_bytes > 0
    assert free_bytes is None or fresh.driver_free_bytes() < free_bytes
    assert 0 < fresh.free_bytes() < fresh.total_bytes()


def test_resident_tensors_are_charged_until_they_die(device):
    before, free_bytes, held_bytes = settled(device), device.free_bytes(), figure(device)
    tensor = device.empty((16, MIB), torch.float32)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((16, MIB), torch.float32, device.torch_device.type)
    assert not tensor.requires_grad
    after = device.memory()
    assert after.allocated_bytes - before.allocated_bytes == 64 * MIB
    assert after.reserved_bytes - before.reserved_bytes >= 64 * MIB
    assert free_bytes - device.free_bytes() >= 64 * MIB
    if held_bytes is not None:
        assert figure(device) - held_bytes >= 64 * MIB
    del tensor
    assert device.memory().allocated_bytes == before.allocated_bytes
    assert settled(device).reserved_bytes == before.reserved_bytes
    assert device.free_bytes() == free_bytes


def test_a_dead_tensor_leaves_its_memory_in_the_cache_until_it_is_emptied(device):
    before = settled(device)
    tensor = device.empty((32 * MIB,), torch.uint8)
    reserved_bytes, free_bytes = device.memory().reserved_bytes, device.free_bytes()
    del tensor
    assert device.memory().reserved_bytes == reserved_bytes
    again = device.empty((32 * MIB,), torch.uint8)
    assert device.memory().reserved_bytes == reserved_bytes
    assert device.free_bytes() == free_bytes
    del again
    device.empty_cache()
    assert device.memory() == MemoryStats(
        before.allocated_bytes, before.reserved_bytes, before.allocated_bytes + 32 * MIB, reserved_bytes
    )


def test_the_peak_is_kept_until_it_is_reset(device):
    tensor = device.empty((32 * MIB,), torch.uint8)
    high_bytes = device.memory().reserved_bytes
    del tensor
    device.empty_cache()
    assert device.memory().peak_reserved_bytes == high_bytes
    device.reset_peak()
    now = device.memory()
    assert now.peak_reserved_bytes == now.reserved_bytes < high_bytes


def test_what_is_computed_is_charged_while_it_lives(device):
    weight = resident(device, 1024, 1024)
    before = settled(device)
    with device.compute():
        product = weight @ weight
        product += 1
        assert device.memory().allocated_bytes - before.allocated_bytes >= 4 * MIB
        del product
        device.synchronize()
        # cuBLAS keeps a workspace on a real device.
        assert device.memory().allocated_bytes - before.allocated_bytes < 4 * MIB or device.torch_device.type == "cuda"
    assert device.memory().peak_reserved_bytes >= before.reserved_bytes + 4 * MIB


def test_nothing_computed_records_gradients(device):
    parameter = torch.nn.Parameter(resident(device, 4, 4))
    with device.compute():
        assert not (parameter * 2).requires_grad
    assert torch.is_grad_enabled()


def test_more_than_the_device_has_is_out_of_memory_and_changes_nothing(device):
    keep = resident(device, 1024)
    free_bytes = device.free_bytes()
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory.*Tried to allocate"):
        device.empty((device.total_bytes() + MIB,), torch.uint8)
    assert device.free_bytes() == free_bytes
    assert torch.isfinite(keep).all()
    assert device.empty((MIB,), torch.uint8).nbytes == MIB


def test_a_copy_fills_part_of_a_resident_tensor(device):
    target = device.empty((4, 3), torch.float32)
    device.copy_from_host(target, torch.zeros(4, 3))
    device.copy_from_host(target[1:3], torch.arange(6.0).reshape(2, 3))
    device.synchronize()
    assert target.cpu().tolist() == [[0, 0, 0], [0, 1, 2], [3, 4, 5], [0, 0, 0]]


def test_queued_copies_are_there_when_their_mark_is_reached(device):
    uploader, target = device.uploader(), device.empty((8,), torch.uint8)
    marks = []
    for start in (0, 4):
        buffer = uploader.buffer(4)
        assert (buffer.shape, buffer.dtype, buffer.device.type) == ((4,), torch.uint8, "cpu")
        buffer.copy_(torch.arange(start, start + 4))
        uploader.copy(target[start : start + 4], buffer)
        marks.append((uploader.mark(), buffer))
    for mark, _ in marks:
        mark.wait()
    assert target.cpu().tolist() == list(range(8))


def test_a_copy_into_a_parameter_is_no_gradient_matter(device):
    parameter = torch.nn.Parameter(device.empty((2,), torch.float32))
    device.copy_from_host(parameter, torch.ones(2))
    assert parameter.detach().cpu().tolist() == [1, 1]


# Graphs


def capturing() -> bool:
    """What a model asks (transformers swallows the error of a build without CUDA in the same way)."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


class Attention:
    """A decode step: writes one row into a cache it closes over, then attends over the whole cache."""

    def __init__(self, device: Device) -> None:
        self.cache = resident(device, 8, 64)
        self.weight = torch.nn.Parameter(resident(device, 64, 64, seed=1))

    def __call__(self, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.cache.index_copy_(0, position, x @ self.weight)
        scores = torch.softmax(x @ self.cache.T / 8, dim=-1)
        return scores @ self.cache, scores.sum(-1)


def inputs_of(device: Device, seed: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = device.empty((1,), torch.int64)
    device.copy_from_host(index, torch.tensor([position]))
    return resident(device, 1, 64, seed=seed), index


def test_a_replay_equals_eager_bit_for_bit_and_overwrites_its_outputs(device):
    step = Attention(device)
    inputs = inputs_of(device, 2, 0)
    graph = device.capture(step, inputs, device.new_graph_pool())
    assert all(kept is given for kept, given in zip(graph.inputs, inputs))
    outputs = graph.outputs
    for seed in (3, 4):
        fresh_x, fresh_position = inputs_of(device, seed, seed)
        graph.inputs[0].copy_(fresh_x)
        graph.inputs[1].copy_(fresh_position)
        cache = step.cache.clone()
        graph.replay()
        replayed, replayed_cache = [output.clone() for output in graph.outputs], step.cache.clone()
        step.cache.copy_(cache)
        with device.compute():
            eager = step(*graph.inputs)
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager))
        assert torch.equal(replayed_cache, step.cache)
    assert all(a is b for a, b in zip(outputs, graph.outputs))


def test_a_replay_writes_the_very_cache_the_step_closed_over(device):
    step = Attention(device)
    graph = device.capture(step, inputs_of(device, 2, 0), device.new_graph_pool())
    step.cache.zero_()
    graph.inputs[1].fill_(5)
    graph.replay()
    assert step.cache[5].abs().sum() > 0
    assert step.cache[:5].abs().sum() == 0
    with torch.no_grad():
        step.weight.zero_()
    graph.replay()
    assert step.cache[5].abs().sum() == 0


def test_capturing_runs_the_step_exactly_once(device):
    count = resident(device, 1)
    count.zero_()
    x = resident(device, 1)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count.add_(1)
        x.mul_(1)
        return (count + x,)

    graph = device.capture(step, (x,), device.new_graph_pool())
    device.synchronize()
    assert count.cpu().tolist() == [1]
    graph.replay()
    graph.replay()
    assert count.cpu().tolist() == [3]


def test_a_step_may_reshape_its_tensors_in_place(device):
    x = resident(device, 4)
    weight = resident(device, 4, 2)
    weight.fill_(1)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        y.unsqueeze_(0)
        product = y @ weight
        y.t_()
        counter = torch.zeros(1, device=x.device)
        counter.add_(1)
        return y.T @ y, product, counter

    graph = device.capture(step, (x,), device.new_graph_pool())
    # Often enough that a shape which changed with each replay would run out of dimensions.
    for _ in range(80):
        x.fill_(1)
        graph.replay()
    assert [output.cpu().tolist() for output in graph.outputs] == [[[16]], [[8, 8]], [1]]


def test_outputs_that_are_views_of_an_input_or_expanded_are_kept_up_to_date(device):
    x = resident(device, 4)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[1:], (x.sum() * 2).expand(3)

    graph = device.capture(step, (x,), device.new_graph_pool())
    x.fill_(1)
    graph.replay()
    assert graph.outputs[0].cpu().tolist() == [1, 1, 1]
    assert graph.outputs[1].cpu().tolist() == [8, 8, 8]
    assert graph.outputs[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda x: (x * x.sum().item(),), id="item"),
        pytest.param(lambda x: (x + 1,) if x.sum() > 0 else (x,), id="if"),
        pytest.param(lambda x: (x.nonzero(),), id="nonzero"),
        pytest.param(lambda x: (x[x > 0],), id="mask index"),
        pytest.param(lambda x: (torch.masked_select(x, x > 0),), id="masked_select"),
        pytest.param(lambda x: (torch.unique(x),), id="unique"),
        pytest.param(lambda x: (torch.where(x > 0)[0],), id="where"),
        pytest.param(lambda x: (x + torch.equal(x, x),), id="equal"),
        pytest.param(lambda x: (x.repeat_interleave((x > 0).long()),), id="repeat_interleave"),
        pytest.param(lambda x: (x * len(x.tolist()),), id="tolist"),
        pytest.param(lambda x: (x * float(x.cpu()[0]),), id="cpu"),
    ],
)
def test_a_step_that_needs_a_value_on_the_host_cannot_be_captured(device, step):
    x = resident(device, 4)
    pool = device.new_graph_pool()
    before = x.clone()
    with pytest.raises(RuntimeError):
        device.capture(step, (x,), pool)
    assert torch.equal(x, before)
    assert not capturing()
    good = device.capture(lambda x: (x + 1,), (x,), device.new_graph_pool())
    good.replay()
    assert torch.equal(good.outputs[0], x + 1)


def test_a_step_can_see_that_it_is_being_captured(device):
    seen = []

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(capturing())
        return (x + 1,)

    device.capture(step, (resident(device, 2),), device.new_graph_pool())
    assert seen == [False, True]
    assert not capturing()


def test_a_graph_holds_its_memory_until_it_is_dropped(device):
    x = resident(device, 1024, 1024)
    pool = device.new_graph_pool()
    before, free_bytes = settled(device), device.free_bytes()
    graph = device.capture(lambda x: ((x * 2 + 1) @ x,), (x,), pool)
    held = settled(device)
    assert held.reserved_bytes - before.reserved_bytes >= 8 * MIB
    assert device.free_bytes() <= free_bytes - 8 * MIB
    graph.replay()
    assert settled(device).reserved_bytes == held.reserved_bytes
    del graph, pool
    assert settled(device).reserved_bytes < held.reserved_bytes


def test_graphs_of_one_pool_share_what_they_do_not_need_at_the_same_time(device):
    x = resident(device, 1024, 1024)
    pool = device.new_graph_pool()
    before = settled(device)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.cat([x, x, x, x]).sum(),)

    graphs = [device.capture(step, (x,), pool)]
    first_bytes = settled(device).reserved_bytes - before.reserved_bytes
    graphs.extend(device.capture(step, (x,), pool) for _ in range(3))
    assert settled(device).reserved_bytes - before.reserved_bytes < 2 * first_bytes
    for graph in graphs:
        graph.replay()


def test_replays_inside_compute_are_not_charged_again(device):
    x = resident(device, 1024, 1024)
    graph = device.capture(lambda x: (x @ x,), (x,), device.new_graph_pool())
    device.empty_cache()
    device.reset_peak()
    before = device.memory()
    with device.compute():
        graph.replay()
    assert device.memory() == before


def test_close_can_be_called_again(device):
    device.empty((MIB,), torch.uint8)
    device.close()
    device.close()


def test_a_replay_is_complete_when_it_returns(device):
    x = resident(device, 8)
    graph = device.capture(lambda x: (x + 1,), (x,), device.new_graph_pool())
    x.fill_(41)
    graph.replay()
    assert graph.outputs[0].cpu().tolist() == [42] * 8


def test_a_capture_runs_the_step_once_eagerly_and_once_to_record_it(device):
    runs = []
    device.capture(lambda x: (runs.append(0) or x + 1,), (resident(device, 4),), device.new_graph_pool())
    assert len(runs) == 2
