"""The built-in engine on a simulated device: what it computes is what the plain transformers model computes.

``whole`` is the tiny checkpoint loaded by transformers itself, never by our loader: the reference for everything here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from stagelaunch.core.errors import StageError  # noqa: E402
from stagelaunch.core.inventory import SimulatedMachine  # noqa: E402
from stagelaunch.core.units import MIB  # noqa: E402
from stagelaunch.devices.simulated import SimulatedDevice  # noqa: E402
from stagelaunch.engines import omni_model, paged  # noqa: E402
from stagelaunch.engines.base import EngineSpec, create_engine  # noqa: E402
from stagelaunch.engines.code2wav import Code2WavRunner  # noqa: E402
from stagelaunch.engines.decode import DecodeRow, DecodeRunner  # noqa: E402
from stagelaunch.engines.graphs import max_abs_diff  # noqa: E402
from stagelaunch.engines.torch_omni import TorchOmniEngine  # noqa: E402
from stagelaunch.weights.index import read_index  # noqa: E402

COMPONENTS = ("thinker", "talker", "code2wav")
CONTEXT_BYTES = 6 * MIB
CHUNK_FRAMES = 50
NUM_BLOCKS = 40
LENGTHS = (5, 17, 30)
STEPS = 11
"""Prompts in 2, 5 and 8 blocks of 4; eleven tokens later each has crossed at least two block borders."""

TOLERANCE = 3e-5
"""Of logits and samples against transformers' own forward, float32. Measured: 4e-6 and 0 (logits are up to 4.5)."""


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path) -> Any:
    model_class = transformers.Qwen3OmniMoeForConditionalGeneration
    return model_class.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def new_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], SimulatedDevice]]:
    """Opens devices of 512 MiB, each of a machine of its own; closed at the end."""
    opened: list[SimulatedDevice] = []

    def open_one() -> SimulatedDevice:
        path = tmp_path_factory.mktemp("machine") / "devices"
        opened.append(SimulatedDevice(SimulatedMachine(path, {0: 512 * MIB}, CONTEXT_BYTES), 0))
        opened[-1].create_context()
        return opened[-1]

    yield open_one
    for device in opened:
        device.close()


def spec_of(component: str, model_dir: Path) -> EngineSpec:
    sizes = (2, 1) if component == "code2wav" else (4, 1)
    return EngineSpec(component, model_dir, "auto", 4, 512, 64, 4, sizes, {"chunk_frames": str(CHUNK_FRAMES)})


def loaded(spec: EngineSpec, device: SimulatedDevice) -> TorchOmniEngine:
    engine = TorchOmniEngine(spec)
    engine.import_libraries()
    engine.allocate_weights(device)
    engine.read_weights(lambda done, total: None)
    return engine


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path, new_device: Callable[[], SimulatedDevice]) -> Iterator[dict[str, TorchOmniEngine]]:
    """Every component ready to serve: KV allocated, two graphs captured. Small chunks: attention takes several."""
    ready = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "CHUNK_BYTES", 40 * 1024)
        for component in COMPONENTS:
            spec = spec_of(component, tiny_checkpoint)
            ready[component] = loaded(spec, new_device())
            if ready[component].kv_layout is not None:
                ready[component].allocate_kv(NUM_BLOCKS)
            for size in spec.capture_sizes:
                ready[component].capture(size)
    yield ready
    for engine in ready.values():
        engine.close()


def decoder(engine: TorchOmniEngine) -> DecodeRunner:
    assert isinstance(engine.runner, DecodeRunner)
    return engine.runner


def vocoder(engine: TorchOmniEngine) -> Code2WavRunner:
    assert isinstance(engine.runner, Code2WavRunner)
    return engine.runner


def sequences(vocab_size: int) -> list[list[int]]:
    random = Random(7)
    return [[random.randrange(vocab_size) for _ in range(length + STEPS)] for length in LENGTHS]


def reference(whole: Any, component: str, tokens: list[int]) -> tuple[Any, Any]:
    """(logits, last hidden states) of every position, by transformers' own forwards, without any cache."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        if component == "thinker":
            hidden = whole.thinker.model.language_model(input_ids=ids, use_cache=False).last_hidden_state
            return whole.thinker(input_ids=ids, use_cache=False).logits[0], hidden[0]
        embeds = whole.talker.get_input_embeddings()(ids)
        positions = torch.arange(len(tokens)).expand(3, 1, -1)
        hidden = whole.talker.model(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
        logits = whole.talker(inputs_embeds=embeds, position_ids=positions, use_cache=False).logits
        return logits[0], hidden[0]


def generated_codes(whole: Any, hidden: Any, first_code: Any) -> list[int]:
    """The codes of one frame by transformers' own generate."""
    talker = whole.talker
    with torch.no_grad():
        embeds = torch.stack([hidden, talker.get_input_embeddings()(first_code)])[None]
        residual = talker.code_predictor.generate(
            inputs_embeds=embeds, max_new_tokens=talker.config.num_code_groups - 1, do_sample=False
        )
    return [int(first_code), *residual[0].tolist()]


@pytest.mark.parametrize("component", ["thinker", "talker"])
def test_decode_over_several_blocks_is_the_plain_model(
    engines: dict[str, TorchOmniEngine], whole: Any, component: str
) -> None:
    """Three sequences of different lengths in shuffled blocks, decoded together through the graph of four rows."""
    runner = decoder(engines[component])
    allocator = runner.cache.allocator
    Random(3).shuffle(allocator._free)
    tokens = sequences(1000)
    tables = [allocator.allocate(len(row)) for row in tokens]
    expected = [reference(whole, component, row) for row in tokens]
    got = [[row] for row in runner.prefill([row[:n] for row, n in zip(tokens, LENGTHS)], tables)[0]]
    codes = []
    for step in range(STEPS):
        rows = [DecodeRow(row[n + step], n + step, table) for row, n, table in zip(tokens, LENGTHS, tables)]
        logits, *rest = runner.decode(rows)
        codes += [output.tolist() for output in rest]
        for sequence, row in zip(got, logits):
            sequence.append(row)
    for sequence, (logits, _), n in zip(got, expected, LENGTHS):
        torch.testing.assert_close(torch.stack(sequence), logits[n - 1 :], atol=TOLERANCE, rtol=0)
    for table in tables:
        assert list(table.blocks) != sorted(table.blocks), "blocks in order test nothing"
        allocator.free(table)
    if component == "talker":
        last = [n + STEPS - 1 for n in LENGTHS]
        assert codes[-1] == [
            generated_codes(whole, hidden[at], logits[at].argmax()) for (logits, hidden), at in zip(expected, last)
        ]


def test_greedy_codes_are_those_transformers_generates(engines: dict[str, TorchOmniEngine], whole: Any) -> None:
    model = decoder(engines["talker"])._model
    assert isinstance(model, omni_model.TalkerModel)
    hidden = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    first = torch.arange(16) * 61
    with torch.no_grad():
        codes = model.predict_codes(hidden, first)
    assert codes.tolist() == [generated_codes(whole, row, code) for row, code in zip(hidden, first)]
    assert len(set(map(tuple, codes[:, 1:].tolist()))) > 8, "equal codes everywhere test nothing"


@pytest.mark.parametrize("component", ["thinker", "talker"])
def test_replay_is_eager_bit_for_bit(engines: dict[str, TorchOmniEngine], component: str) -> None:
    """Again and again with new tokens: the graph reads its inputs anew each time."""
    runner = decoder(engines[component])
    allocator = runner.cache.allocator
    tables = [allocator.allocate(20) for _ in range(3)]
    runner.prefill([list(range(n, 2 * n)) for n in (4, 9, 13)], tables)
    seen = set()
    for step in range(4):
        rows = [DecodeRow(100 * step + n, n + step, table) for n, table in zip((4, 9, 13), tables)]
        replayed = runner.decode(rows)
        eager = runner.decode_eagerly(rows, batch=4)
        assert [output.shape for output in replayed] == [output.shape for output in eager]
        assert all(torch.equal(one, other) for one, other in zip(replayed, eager))
        seen.add(float(replayed[0].sum()))
    assert len(seen) == 4
    for table in tables:
        allocator.free(table)


@pytest.mark.parametrize("component", ["thinker", "talker"])
def test_a_real_row_never_touches_the_null_block(engines: dict[str, TorchOmniEngine], component: str) -> None:
    """Neither by what it writes nor by what it reads: the null block holds NaN here. Padding rows do write it."""
    runner = decoder(engines[component])
    cache = runner.cache
    layers = range(cache.layout.num_layers)

    def null_block() -> Any:
        return torch.stack([part[0] for layer in layers for part in cache.blocks(layer)])

    for layer in layers:
        for part in cache.blocks(layer):
            part[0] = torch.nan
    table = cache.allocator.allocate(9)
    runner.prefill([list(range(8))], [table])
    logits = runner.decode([DecodeRow(5, 8, table)])[0]
    assert logits.isfinite().all()
    assert null_block().isnan().all()
    runner.decode([DecodeRow(5, 8, table), DecodeRow(5, 8, table)])
    assert null_block()[:, 0].isfinite().all(), "the graph of four rows has padding"
    cache.allocator.free(table)


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_probe_compares_the_smallest_graph_with_eager(engines: dict[str, TorchOmniEngine], component: str) -> None:
    engine = engines[component]
    free = None if component == "code2wav" else decoder(engine).cache.allocator.num_free
    probe = engine.probe()
    assert (probe.batch_size, probe.through_graph, probe.max_abs_diff, probe.matches) == (1, True, 0.0, True)
    assert probe.output_shape[-1] == {"thinker": 4096, "talker": 1088, "code2wav": 1185}[component]
    assert probe.elapsed_s > 0
    if free is not None:
        assert decoder(engine).cache.allocator.num_free == free


def test_the_probe_sees_a_graph_that_differs(
    engines: dict[str, TorchOmniEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = decoder(engines["thinker"])
    honest = runner.decode_eagerly
    monkeypatch.setattr(runner, "decode_eagerly", lambda *a, **k: tuple(out + 0.5 for out in honest(*a, **k)))
    probe = engines["thinker"].probe()
    assert probe.max_abs_diff == pytest.approx(0.5, abs=1e-5)
    assert not probe.matches


def test_nan_is_never_taken_for_equal() -> None:
    """Two broken outputs alike are still broken."""
    broken = (torch.tensor([[1.0, torch.nan]]),)
    assert max_abs_diff(broken, broken, rows=1) != 0.0


def test_code2wav_is_the_plain_model_and_its_graph_is_eager(engines: dict[str, TorchOmniEngine], whole: Any) -> None:
    runner = vocoder(engines["code2wav"])
    codes = torch.randint(0, 1024, (2, 4, CHUNK_FRAMES), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        plain = whole.code2wav(codes)
        eager = runner._model.forward(codes)
    replayed = runner.decode(codes)
    assert torch.equal(replayed, eager)
    assert not torch.equal(replayed[0], replayed[1])
    torch.testing.assert_close(replayed, plain, atol=TOLERANCE, rtol=0)


def test_code2wav_hears_only_its_window(engines: dict[str, TorchOmniEngine], whole: Any) -> None:
    """A chunk longer than the attention window of 72 frames, against the mask transformers builds."""
    codes = torch.randint(0, 1024, (1, 4, 100), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, plain = vocoder(engines["code2wav"])._model.forward(codes), whole.code2wav(codes)
    torch.testing.assert_close(ours, plain, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_tensor_is_bit_exact(engines: dict[str, TorchOmniEngine], whole: Any, component: str) -> None:
    """Parameters as transformers loads them, buffers as its constructor computes them; nothing left on meta."""
    module = engines[component].runner._model.module  # type: ignore[attr-defined]
    part = getattr(whole, component)
    for ours, theirs in ((module.state_dict(), part.state_dict()), *[dict_pair(module, part)]):
        assert ours.keys() == theirs.keys()
        assert [n for n in ours if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])] == []
    tensors = [*module.parameters(), *module.buffers()]
    assert [tensor for tensor in tensors if tensor.is_meta or tensor.requires_grad] == []
    assert not module.training


def dict_pair(module: Any, part: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    buffers = dict(part.named_buffers())
    assert len(buffers) >= 3, "rotary frequencies at least, twice, and an offset or sinusoids"
    return dict(module.named_buffers()), buffers


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What is dropped must be gone at once, not at the next garbage collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("component", COMPONENTS)
def test_memory_rises_with_each_phase_and_returns(
    tiny_checkpoint: Path, new_device: Callable[[], SimulatedDevice], component: str
) -> None:
    """Weights, a profile with a peak, a trial capture that is taken back, the real ones, and nothing after close."""
    device = new_device()
    engine = loaded(spec_of(component, tiny_checkpoint), device)
    weights = device.memory().allocated_bytes
    parameters = engine.runner._model.module.parameters()  # type: ignore[attr-defined]
    assert weights >= sum(parameter.nbytes for parameter in parameters)
    device.empty_cache()
    device.reset_peak()
    before = device.memory().reserved_bytes
    engine.run_largest_batch()
    assert device.memory().peak_reserved_bytes > before
    assert device.memory().allocated_bytes == weights

    for num_blocks in (18, NUM_BLOCKS) if engine.kv_layout is not None else (0, 0):
        if engine.kv_layout is not None:
            engine.allocate_kv(num_blocks)
            assert device.memory().allocated_bytes == weights + num_blocks * engine.kv_layout.block_bytes
        engine.capture(1)
        with_graph = device.memory().allocated_bytes
        engine.release_graphs()
        device.empty_cache()
        assert device.memory().allocated_bytes < with_graph
        engine.release_kv()
        assert device.memory().allocated_bytes == weights

    if engine.kv_layout is not None:
        engine.allocate_kv(NUM_BLOCKS)
    engine.capture(1)
    engine.probe()
    engine.close()
    engine.close()
    device.empty_cache()
    assert device.memory().allocated_bytes == 0
    assert device.process_bytes() == CONTEXT_BYTES


def test_without_graphs_the_probe_runs_eagerly(
    tiny_checkpoint: Path, new_device: Callable[[], SimulatedDevice]
) -> None:
    for component in ("thinker", "code2wav"):
        engine = loaded(spec_of(component, tiny_checkpoint), new_device())
        if engine.kv_layout is not None:
            engine.allocate_kv(NUM_BLOCKS)
        probe = engine.probe()
        assert (probe.through_graph, probe.matches) == (False, True)
        engine.close()


@pytest.mark.parametrize("component", ["thinker", "talker"])
def test_eager_experts_cannot_be_captured(
    tiny_checkpoint: Path, new_device: Callable[[], SimulatedDevice], component: str
) -> None:
    """The stand-in for capture fails where CUDA would: eager experts look at which experts were chosen."""
    options = {"experts_implementation": "eager"}
    engine = loaded(replace(spec_of(component, tiny_checkpoint), options=options), new_device())
    engine.allocate_kv(NUM_BLOCKS)
    assert engine.probe().matches
    with pytest.raises(RuntimeError, match="data-dependent"):
        engine.capture(1)
    engine.close()


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "expected"),
    [(4, 512, (4, 64)), (4, 100, (4, 25)), (3, 100, (3, 34)), (1, 8, (1, 8)), (8, 4, (8, 1))],
)
def test_the_largest_batch_is_equal_prompts_of_all_tokens(
    engines: dict[str, TorchOmniEngine],
    monkeypatch: pytest.MonkeyPatch,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    expected: tuple[int, int],
) -> None:
    """Rounded up, so never fewer tokens than allowed; capped by max_model_len, 64 here. One row each for the head."""
    ready = decoder(engines["talker"])
    spec = replace(ready._spec, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    runner = DecodeRunner(ready._model, spec, ready.kv_layout, torch.float32, ready._device)
    shapes = []
    plain, outputs = ready._model.hidden_states, ready._model.outputs
    monkeypatch.setattr(ready._model, "hidden_states", lambda ids, *rest: shapes.append(ids.shape) or plain(ids, *rest))
    monkeypatch.setattr(ready._model, "outputs", lambda hidden: shapes.append(hidden.shape) or outputs(hidden))
    runner.run_largest_batch()
    assert shapes == [expected, (expected[0], 128)]


@pytest.mark.parametrize(
    ("tokens", "seqs", "graphs", "batch"),
    [(200, 4, (), 1), (600, 4, (), 3), (8000, 4, (), 4), (1, 4, (), 1), (200, 4, (3, 1), 3), (600, 4, (2,), 3)],
)
def test_the_largest_batch_of_code2wav_is_as_many_chunks_as_tokens_or_graphs_take(
    engines: dict[str, TorchOmniEngine], tokens: int, seqs: int, graphs: tuple[int, ...], batch: int
) -> None:
    """A graph is a batch the stage may run: a profile that did not see it would leave its memory out."""
    spec = replace(spec_of("code2wav", Path()), max_num_batched_tokens=tokens, max_num_seqs=seqs, capture_sizes=graphs)
    runner = Code2WavRunner(vocoder(engines["code2wav"])._model, spec, None, CHUNK_FRAMES)  # type: ignore[arg-type]
    assert runner.largest_batch == batch


def test_calls_out_of_order_are_refused(tiny_checkpoint: Path, new_device: Callable[[], SimulatedDevice]) -> None:
    engine = TorchOmniEngine(spec_of("talker", tiny_checkpoint))
    with pytest.raises(StageError, match="cannot read the weights: nothing is allocated"):
        engine.read_weights(lambda done, total: None)
    with pytest.raises(StageError, match="cannot run the stage: its weights are not on a device"):
        engine.run_largest_batch()
    engine = loaded(spec_of("talker", tiny_checkpoint), new_device())
    with pytest.raises(StageError, match="no KV cache is allocated"):
        engine.capture(1)
    engine.allocate_kv(18)
    with pytest.raises(StageError, match="cannot allocate the KV cache: there is one"):
        engine.allocate_kv(18)
    engine.close()


def test_a_graph_keeps_its_cache(engines: dict[str, TorchOmniEngine]) -> None:
    """On CUDA a graph holds addresses, not tensors: without this the next replay would write into freed memory."""
    with pytest.raises(StageError, match="cannot release the KV cache: 2 graphs use its memory"):
        engines["thinker"].release_kv()
    with pytest.raises(StageError, match="cannot capture batch size 1: it is captured already"):
        engines["thinker"].capture(1)


def test_code2wav_has_no_cache_and_no_batch_beyond_its_profile(engines: dict[str, TorchOmniEngine]) -> None:
    engine = engines["code2wav"]
    assert engine.kv_layout is None
    with pytest.raises(StageError, match="cannot allocate 8 KV blocks: code2wav keeps no KV cache"):
        engine.allocate_kv(8)
    with pytest.raises(StageError, match=r"cannot capture 3 chunks of 50 frames: .* largest batch is 2,"):
        engine.capture(3)


def test_the_engine_goes_by_its_name(tiny_checkpoint: Path) -> None:
    assert isinstance(create_engine("qwen3-omni", spec_of("thinker", tiny_checkpoint)), TorchOmniEngine)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunk_frame": "3"}, "cannot use options chunk_frame: unknown"),
        ({"chunk_frames": "0"}, "cannot use chunk_frames '0'"),
        ({"chunk_frames": "many"}, "cannot use chunk_frames 'many'"),
    ],
)
def test_options_nobody_knows_are_refused(tiny_checkpoint: Path, options: dict[str, str], text: str) -> None:
    with pytest.raises(StageError, match=text):
        TorchOmniEngine(replace(spec_of("code2wav", tiny_checkpoint), options=options))


@pytest.mark.parametrize("version", ["5.23.0", "5.25.1", "4.57.0", "6.0"])
def test_another_minor_of_transformers_is_refused(version: str) -> None:
    with pytest.raises(StageError, match=f"cannot use transformers {version}: .*5.24"):
        omni_model.check_version(version)


def test_any_patch_of_the_minor_is_accepted() -> None:
    omni_model.check_version("5.24.7")
    omni_model.check_version("5.24.0.dev0")


def test_a_component_that_cannot_be_built_is_named(tiny_checkpoint: Path) -> None:
    config = read_index(tiny_checkpoint).config
    with pytest.raises(StageError, match="cannot build component 'vocoder': unknown; name one of thinker"):
        omni_model.build("vocoder", config)
    talker = {key: value for key, value in config["talker_config"].items() if key != "spatial_merge_size"}
    with pytest.raises(StageError, match=r"cannot build talker from config.json: AttributeError: .*spatial_merge_size"):
        omni_model.build("talker", {**config, "talker_config": talker})


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_targets_that_are_not_the_module_are_refused(
    tiny_checkpoint: Path, new_device: Callable[[], SimulatedDevice], change: str
) -> None:
    """The module and the plan come from two sources; where they differ, nothing may stay random."""
    model = omni_model.build("code2wav", read_index(tiny_checkpoint).config)
    targets = {name: (tuple(t.shape), torch.float32) for name, t in model.module.state_dict().items()}
    name = "code_embedding.weight"
    if change == "missing":
        del targets[name]
    elif change == "unexpected":
        name = "code_embedding.bias"
        targets[name] = ((64,), torch.float32)
    else:
        targets[name] = ((1, 64), torch.float32)
    device = new_device()
    with pytest.raises(StageError, match=f"cannot build code2wav: 1 tensors of the checkpoint differ .*{name}"):
        model.materialise(targets, device)
    assert device.memory().allocated_bytes == 0


def test_a_buffer_nobody_computes_is_not_left_without_memory(
    tiny_checkpoint: Path, new_device: Callable[[], SimulatedDevice]
) -> None:
    model = omni_model.build("code2wav", read_index(tiny_checkpoint).config)
    targets = {name: (tuple(t.shape), torch.float32) for name, t in model.module.state_dict().items()}
    model.module.register_buffer("window", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(StageError, match="cannot build code2wav: 1 tensors have no memory: window"):
        model.materialise(targets, new_device())
