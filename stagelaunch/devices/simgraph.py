"""A stand-in for a CUDA graph: a step recorded once, operator by operator, and replayed on static memory.

As on a device, every operator of a replay writes where it wrote when it was recorded. It is honest where it matters:
a step that needs a tensor's value on the host cannot be recorded, what the step closes over is read and written by
reference, and the graph's memory stays taken until the graph is dropped. No torch.fx: its tracer imports the
compiler, seconds of every worker's boot, and leaves cycles that keep the step's tensors alive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stagelaunch.devices.base import Step
from stagelaunch.devices.simmemory import (
    ActivationTracker,
    Allocator,
    OperatorMode,
    on_death,
    round_to_segments,
    storages,
)

_HOST_READS = {
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.__array__: "numpy.asarray()",
}
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX_OPS = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}


class GraphPool:
    """Memory that graphs captured one after another share. It goes back when its last graph and output are gone."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._outputs_bytes = 0
        self._size_bytes = [0]
        on_death(self, _retire, allocator, self._size_bytes)

    def belongs_to(self, allocator: Allocator) -> bool:
        """Whether this is a pool of that allocator's device."""
        return self._allocator is allocator

    def make_room(self, peak_bytes: int) -> None:
        """Room for a graph whose run takes ``peak_bytes`` beside the outputs of the graphs that live."""
        missing_bytes = round_to_segments(self._outputs_bytes + peak_bytes) - self._size_bytes[0]
        if missing_bytes > 0:
            self._allocator.grow_pool(missing_bytes)
            self._size_bytes[0] += missing_bytes

    def keep(self, output: torch.UntypedStorage) -> None:
        """Static output memory: while it lives the pool does, and no later graph may reuse it."""
        self._outputs_bytes += output.nbytes()
        on_death(output, self._release, output.nbytes())

    def _release(self, size_bytes: int) -> None:
        self._outputs_bytes -= size_bytes


def _retire(allocator: Allocator, size_bytes: list[int]) -> None:
    allocator.retire_pool(size_bytes[0])


@dataclass(frozen=True)
class _Call:
    """One recorded operator. ``results`` are the storages it created, in order; None where it returned old memory."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.UntypedStorage | None, ...]

    def run(self) -> None:
        again = storages((self.operator(*self.args, **self.kwargs),))
        for static, storage in zip(self.results, again):
            # Whole storages: a result may be one that cannot be written as a tensor (expanded, overlapping).
            if static is not None:
                static.copy_(storage)


@dataclass(frozen=True)
class SimulatedGraph:
    """A recorded step. See ``base.Graph``."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    calls: tuple[_Call, ...]
    allocator: Allocator
    check: Callable[[], None]
    pool: GraphPool

    def replay(self) -> None:
        """Run the recorded operators once. Charged to nobody: the memory is the pool's."""
        self.check()
        with self.allocator.pause(), torch.no_grad():
            for call in self.calls:
                call.run()


def capture(
    allocator: Allocator, check: Callable[[], None], step: Step, inputs: tuple[torch.Tensor, ...], pool: GraphPool
) -> SimulatedGraph:
    """Run ``step`` once eagerly, size the pool by its peak, record it. See ``base.Device.capture``."""
    with _no_collector(), allocator.watch_peak() as peak_bytes, ActivationTracker(allocator), torch.no_grad():
        _check_outputs(step(*inputs))
    pool.make_room(peak_bytes())
    recorder = _Recorder()
    with allocator.pause(), torch.no_grad(), _capture_in_progress():
        try:
            with recorder, _NoHostReads():
                outputs = _check_outputs(step(*inputs))
        finally:
            recorder.undo()
    for storage in {s._cdata: s for s in storages(outputs)}.values():
        if recorder.created(storage):
            pool.keep(storage)
    return SimulatedGraph(inputs, outputs, tuple(recorder.calls), allocator, check, pool)


def count(
    allocator: Allocator, step: Step, inputs: tuple[torch.Tensor, ...], pool: GraphPool
) -> tuple[torch.Tensor, ...]:
    """Charge what ``capture`` would, by one run over tensors without data; its outputs. There is nothing to record."""
    held = allocator.held()
    with _no_collector(), allocator.watch_peak() as peak_bytes, ActivationTracker(allocator), torch.no_grad():
        outputs = _check_outputs(step(*inputs))
    pool.make_room(peak_bytes())
    for storage in {s._cdata: s for s in storages(outputs)}.values():
        if allocator.holds(storage) and storage._cdata not in held:
            allocator.release(storage)
            pool.keep(storage)
    return outputs


def _check_outputs(outputs: Any) -> tuple[torch.Tensor, ...]:
    if not isinstance(outputs, tuple) or not all(isinstance(output, torch.Tensor) for output in outputs):
        raise TypeError(f"cannot capture the step: it returned {type(outputs).__name__}; return a tuple of tensors")
    return outputs


@contextmanager
def _no_collector() -> Iterator[None]:
    """Old garbage that died during the run would hide part of its peak; collecting it before costs far more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _capture_in_progress() -> Iterator[None]:
    """Make torch say that a stream is capturing: models skip their own checks on the host then (transformers)."""
    real = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = real


def _refusal(what: str) -> RuntimeError:
    return RuntimeError(
        f"cannot capture the step: {what} needs a tensor's value on the host (data-dependent control flow);"
        " keep the decision on the device, with masks or torch.where"
    )


class _NoHostReads(TorchFunctionMode):
    """Refuses the reads of a tensor that never reach an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOST_READS:
            raise _refusal(_HOST_READS[func])
        return func(*args, **(kwargs or {}))


class _Recorder(OperatorMode):  # type: ignore[no-untyped-call]
    """Records every operator that creates or writes memory; refuses those that wait for a value.

    A capture on a device only records. Recording here runs the step, so what it writes into memory that was there
    before is put back by ``undo``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._created: set[int] = set()
        """All alive, because the calls hold their results: an address stands for one storage."""
        self._undo: list[Callable[[], object]] = []
        self._saved: dict[int, torch.UntypedStorage] = {}
        """Storages that ``undo`` puts back as a whole; kept, so that an address stands for one of them."""

    def created(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` came to be in the recording."""
        return storage._cdata in self._created

    def undo(self) -> None:
        """Put back what the step wrote into memory that was there before, the last write first."""
        while self._undo:
            self._undo.pop()()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits_for_value(func, args, kwargs):
            raise _refusal(str(func))
        if func is torch.ops.aten.lift_fresh.default:
            # A constant written down in the step: every replay starts from its value.
            func = torch.ops.aten.clone.default
        if func._schema.is_mutable:
            self._remember(func, args, kwargs)
        given = {s._cdata for s in storages((args, tuple(kwargs.values())))}
        before = _frozen(args), {name: _frozen(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        fresh = tuple(None if s._cdata in given | self._created else s for s in storages((result,)))
        self._created.update(s._cdata for s in fresh if s is not None)
        # A view needs no replay: the memory it shows stays where it is.
        if any(s is not None for s in fresh) or (func._schema.is_mutable and torch.Tag.inplace_view not in func.tags):
            self.calls.append(_Call(func, before[0], before[1], fresh))
        return result

    def _remember(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how to take back what ``func`` is about to write into memory that was there before."""
        written = list(storages(_written(func, args, kwargs)))
        old = [s for s in written if not self.created(s) and s._cdata not in self._saved]
        if not old:
            return
        if func is torch.ops.aten.index_copy_.default:
            # A few rows of what may be a whole KV cache: only they are kept.
            target, dim, index = args[:3]
            rows = target.index_select(dim, index)
            self._undo.append(lambda: target.index_copy_(dim, index, rows))
            return
        for storage in old:
            self._saved[storage._cdata] = storage
            self._undo.append(partial(storage.copy_, storage.clone()))  # type: ignore[no-untyped-call]


def _frozen(value: Any) -> Any:
    """Arguments as they are now: the step may reshape its tensors in place afterwards (unsqueeze_, t_)."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return type(value)(_frozen(element) for element in value)
    return value


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments an operator writes."""
    values = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    return [
        values[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in values
    ]


def _waits_for_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a device would have to finish the operator before the host can go on."""
    if func in _INDEX_OPS:
        # Indexing with numbers has a known shape; with a mask it has not.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return not _VALUE_TAGS.isdisjoint(func.tags)
