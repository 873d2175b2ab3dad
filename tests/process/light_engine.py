"""A small engine for process tests: real tensors, real capture, no model library, and faults on demand.

``options: {fault: "PHASE:KIND"}`` makes the stage misbehave in that phase, in its own process. With ``options: {hold:
FIFO}`` it waits in ``read_weights`` until a byte can be read from the FIFO, so that tests can act while it boots.
With ``hidden`` the driver tells this stage nothing about processes. ``intruder`` names a file of lines ``PHASE BYTES``:
when its turn comes, somebody else holds so much of the device from that phase on. ``surprise_mib``: the smallest graph
takes so much more than the trial captures let expect. With ``no_kv`` the stage keeps no KV cache. ``words`` are printed
before that wait and after it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from misbehaviour import misbehave

from stagelaunch.core.ledger import KVLayout
from stagelaunch.devices.base import Device, Graph
from stagelaunch.devices.simfile import SimulatedFile
from stagelaunch.devices.simulated import SimulatedDevice
from stagelaunch.engines.base import EngineSpec, ProbeResult, Progress

HIDDEN = 256


def hold_as_a_stranger(device: Device, size_bytes: int) -> None:
    assert isinstance(device, SimulatedDevice)
    file = SimulatedFile.open(device._machine)
    file.set_foreign_bytes(device._index, size_bytes)
    file.close()


class LightEngine:
    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self._fault_phase, _, self._fault_kind = spec.options.get("fault", "").partition(":")
        self._layout = KVLayout(2, 2, 64, 4, spec.block_size)
        self._layouts = 0
        self._kv_allocations = 0
        self._captures = 0
        self._graphs: dict[int, Graph] = {}
        self._pool: object | None = None
        self._kv: torch.Tensor | None = None

    def _maybe(self, phase: str) -> None:
        self._maybe_intrude(phase)
        if phase == self._fault_phase:
            misbehave(self._fault_kind)

    def _maybe_intrude(self, phase: str) -> None:
        path = self._spec.options.get("intruder")
        if path is None:
            return
        first, _, rest = Path(path).read_text().partition("\n")
        if first.startswith(f"{phase} "):
            Path(path).write_text(rest)
            hold_as_a_stranger(self._device, int(first.split()[1]))

    def import_libraries(self) -> None:
        self._maybe("import")
        if "hidden" in self._spec.options:
            SimulatedDevice.process_table = lambda _: None  # type: ignore[method-assign]
        if self._spec.options.get("intruder"):
            self._intrude_on_context()
        if self._fault_phase == "context":
            SimulatedDevice.create_context = lambda _: misbehave(self._fault_kind)  # type: ignore[method-assign]

    def _intrude_on_context(self) -> None:
        create, engine = SimulatedDevice.create_context, self

        def create_disturbed(device: SimulatedDevice) -> None:
            create(device)
            engine._device = device
            engine._maybe_intrude("context")

        SimulatedDevice.create_context = create_disturbed  # type: ignore[method-assign]

    def allocate_weights(self, device: Device) -> None:
        self._device = device
        megabytes = int(self._spec.options.get("weights_mib", "8"))
        self._ballast = device.empty((megabytes << 18,), torch.float32)
        self._weight = device.empty((HIDDEN, HIDDEN), torch.float32)

    def read_weights(self, progress: Progress) -> None:
        self._maybe("load")
        words = self._spec.options.get("words", "")
        print(end=words and f"{words}\n")
        self._wait_for_test()
        print(end=words and f"{words} again\n")
        torch.manual_seed(self._spec.max_num_seqs)
        self._weight.copy_(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5)
        self._ballast.zero_()
        size = self._ballast.nbytes + self._weight.nbytes
        progress(size, size)

    def _wait_for_test(self) -> None:
        fifo = self._spec.options.get("hold")
        if fifo is not None:
            with Path(fifo).open("rb") as file:
                file.read(1)

    def run_largest_batch(self) -> None:
        self._maybe("profile")
        with self._device.compute():
            hidden = torch.ones(self._spec.max_num_batched_tokens, HIDDEN)
            for _ in range(3):
                hidden = torch.tanh(hidden @ self._weight)

    @property
    def kv_layout(self) -> KVLayout | None:
        self._layouts += 1
        # The first time is for the trial captures of the profile phase.
        if self._layouts == 2:
            self._maybe("size")
        return None if "no_kv" in self._spec.options else self._layout

    def allocate_kv(self, num_blocks: int) -> None:
        self._kv_allocations += 1
        if self._kv_allocations == 2:
            self._maybe("allocate")
        self._kv = self._device.empty((num_blocks, self._layout.block_bytes // 4), torch.float32)

    def release_kv(self) -> None:
        self._kv = None

    def capture(self, size: int) -> None:
        self._captures += 1
        # The first three are the trial captures of the profile phase.
        if self._captures == 4:
            self._maybe("capture")
        self._pool = self._pool or self._device.new_graph_pool()
        inputs = self._device.empty((size, HIDDEN), torch.float32)
        inputs.fill_(0.5)
        self._graphs[size] = self._device.capture(self._step, (inputs,), self._pool)

    def _step(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        surprise_mib = int(self._spec.options.get("surprise_mib", "0"))
        if surprise_mib and len(hidden) == min(self._spec.capture_sizes):
            hidden = hidden + torch.ones(surprise_mib << 10, HIDDEN).mean(0)
        return (torch.tanh(hidden @ self._weight),)

    def release_graphs(self) -> None:
        self._graphs.clear()
        self._pool = None

    def probe(self) -> ProbeResult:
        self._maybe("ready")
        graph = self._graphs[min(self._graphs)]
        graph.replay()
        with self._device.compute():
            (eager,) = self._step(*graph.inputs)
        (replayed,) = graph.outputs
        return ProbeResult(len(replayed), True, float((eager - replayed).abs().max()), tuple(replayed.shape), 0.0)

    def close(self) -> None:
        self._maybe("stop")
        self.release_graphs()
        self.release_kv()
        del self._weight, self._ballast
