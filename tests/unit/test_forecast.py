"""A forecast is what the simulated device measures, to the byte; and of the published model what its makers say."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from stagelaunch.core.errors import CheckpointError  # noqa: E402
from stagelaunch.core.inventory import SimulatedMachine  # noqa: E402
from stagelaunch.core.ledger import estimate_graphs  # noqa: E402
from stagelaunch.core.need import (  # noqa: E402
    NeedRequest,
    StageNeed,
    need_from_json,
    need_to_json,
    request_from_json,
    request_to_json,
)
from stagelaunch.core.units import GIB, MIB  # noqa: E402
from stagelaunch.devices import simmemory  # noqa: E402
from stagelaunch.devices.forecast import ForecastDevice  # noqa: E402
from stagelaunch.devices.simulated import SimulatedDevice  # noqa: E402
from stagelaunch.engines import paged  # noqa: E402
from stagelaunch.engines.base import EngineSpec, create_engine  # noqa: E402
from stagelaunch.weights.index import read_index  # noqa: E402
from stagelaunch.weights.omni_spec import COMPONENTS, kv_layout  # noqa: E402
from stagelaunch.weights.plan import plan_component  # noqa: E402
from stagelaunch.weights.reader import fill  # noqa: E402
from stagelaunch.weights.synthetic import PUBLISHED_SHARDS, published_config, write_checkpoint  # noqa: E402
from stagelaunch.weights.validate import require_data, validate  # noqa: E402
from stagelaunch.worker.forecast import forecast  # noqa: E402
from stagelaunch.worker.measure import TRIAL_CAPTURES  # noqa: E402

LIGHT = "light_engine:LightEngine"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published model: headers only."""
    directory = tmp_path_factory.mktemp("published") / "model"
    write_checkpoint(directory, config=published_config(), headers_only=True, num_shards=PUBLISHED_SHARDS)
    return directory


def measured(spec: EngineSpec, engine_name: str, directory: Path) -> StageNeed:
    """The same walk with data, on a simulated device."""
    device = SimulatedDevice(SimulatedMachine(directory / "devices", {0: 512 * MIB}, 0), 0)

    def settled() -> int:
        gc.collect()
        device.empty_cache()
        return device.memory().reserved_bytes

    device.create_context()
    engine = create_engine(engine_name, spec)
    engine.import_libraries()
    engine.allocate_weights(device)
    engine.read_weights(lambda done, total: None)
    weights = settled()
    engine.run_largest_batch()
    settled()
    device.reset_peak()
    engine.run_largest_batch()
    activations = device.memory().peak_reserved_bytes - settled()
    layout, trials = engine.kv_layout, []
    if layout is not None:
        engine.allocate_kv(layout.blocks_for(1))
    for size in spec.capture_sizes[:TRIAL_CAPTURES]:
        before = settled()
        engine.capture(size)
        trials.append(settled() - before)
    engine.close()
    device.close()
    return StageNeed(weights, activations, estimate_graphs(trials, len(spec.capture_sizes)), layout)


@pytest.mark.parametrize("component", [*COMPONENTS, "light"])
def test_a_forecast_is_what_the_simulated_device_measures(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, component: str
) -> None:
    """To the byte: segments of one byte hide nothing. Decode attention takes all chunks, the forecast three."""
    monkeypatch.setattr(simmemory, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(paged, "CHUNK_BYTES", 16 * 1024)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "process"))
    name, options = (LIGHT, {}) if component == "light" else ("qwen3-omni", {"chunk_frames": "50"})
    spec = EngineSpec(component, tiny_checkpoint, "auto", 4, 256, 64, 4, (4, 3, 2, 1), options)
    need = forecast(spec, name)
    assert need == measured(spec, name, tmp_path)
    assert min(need.weights_bytes, need.activations_bytes, need.graphs_bytes) > 4096
    assert need.layout is not None or component == "code2wav"
    assert need_from_json(json.loads(json.dumps(need_to_json(need)))) == need


def test_a_few_chunks_of_attention_take_what_all_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention is the peak of a step: the first chunk does not meet what its predecessor left, later ones do."""
    monkeypatch.setattr(simmemory, "SEGMENT_BYTES", 1)

    def peak_bytes(max_chunks: int | None) -> int:
        device = ForecastDevice()
        blocks, query = device.empty((9, 4, 2, 32), torch.bfloat16), device.empty((3, 4, 32), torch.bfloat16)
        tables, lens = device.empty((3, 16), torch.int64), device.empty((3,), torch.int64)
        device.reset_peak()
        with device.compute():
            paged.paged_attention(query, blocks, blocks, tables, lens, 1.0, 2, max_chunks)
        return device.memory().peak_reserved_bytes

    assert peak_bytes(1) < peak_bytes(paged.FORECAST_CHUNKS) == peak_bytes(None)


def test_the_published_model_has_its_published_size(published: Path) -> None:
    index = read_index(published)
    validate(index, COMPONENTS)
    assert index.headers_only
    assert len(list(published.glob("*.safetensors"))) == PUBLISHED_SHARDS
    sizes = {component: round(size / GIB, 2) for component, size in index.component_bytes().items()}
    assert sizes == {"thinker": 59.08, "talker": 6.19, "code2wav": 0.40}
    layouts = [kv_layout(index.config, component, 16, 2) for component in ("thinker", "talker")]
    assert [layout.bytes_per_token for layout in layouts if layout] == [98_304, 20_480]
    on_disk = sum(512 * path.stat().st_blocks for path in published.iterdir())
    assert on_disk < 32 * MIB, "sparse files"


def test_a_forecast_of_the_published_vocoder(published: Path) -> None:
    """Its activations are ten times its weights: at full rate a tensor of 96 channels is 0.11 GiB a row."""
    need = forecast(EngineSpec("code2wav", published, "auto", 1, 5200, 8192, 16, (1,)), "qwen3-omni")
    assert need.layout is None
    assert 0 <= need.weights_bytes - read_index(published).component_bytes()["code2wav"] < 4 * MIB
    one_tensor = 96 * 325 * 1920 * 2
    assert 4 * one_tensor < need.activations_bytes < 9 * one_tensor
    assert need.graphs_bytes >= need.activations_bytes - MIB


def test_headers_only_are_never_loaded(published: Path, tiny_checkpoint: Path) -> None:
    plan = plan_component(read_index(published), "code2wav")
    with pytest.raises(CheckpointError, match="holds headers only: there is no data in it"):
        fill(plan, {}, None, lambda done, total: None)
    with pytest.raises(CheckpointError, match="holds headers only"):
        require_data(read_index(published))
    require_data(read_index(tiny_checkpoint))


def test_what_needs_a_value_is_refused() -> None:
    device = ForecastDevice()
    flags = device.empty((4,), torch.bool)
    with device.compute(), pytest.raises(Exception, match="_local_scalar_dense"):
        int(flags.sum())
    with device.compute(), pytest.raises(Exception, match="nonzero"):
        flags.nonzero()


def test_what_is_dropped_is_not_counted() -> None:
    """Also outputs of a graph, which belong to its pool: a graph that returns what it was given keeps nothing more."""
    device = ForecastDevice()
    given = device.empty((1024, 1024), torch.float32)
    pool = device.new_graph_pool()
    graph = device.capture(lambda x: (x, x + 1), (given,), pool)
    device.empty_cache()
    assert device.memory().reserved_bytes == 8 * MIB
    with pytest.raises(RuntimeError, match="no data"):
        graph.replay()
    del graph, pool, given
    device.empty_cache()
    assert device.memory().reserved_bytes == 0


def test_a_request_survives_json() -> None:
    spec = EngineSpec("x", Path("/m"), "auto", 4, 256, 64, 16, (4, 1), {"a": "b"})
    request = NeedRequest(3, LIGHT, spec, {"C": "d"})
    assert request_from_json(json.loads(json.dumps(request_to_json(request)))) == request


@pytest.mark.parametrize(
    "change",
    [{"weights_bytes": -1}, {"graphs_bytes": 2.5}, {"layout": {"num_layers": 0}}, {"activations_bytes": 2**60}],
)
def test_impossible_needs_are_refused(change: dict[str, Any]) -> None:
    layout = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype_bytes": 1, "block_size": 1}
    body = {"weights_bytes": 1, "activations_bytes": 1, "graphs_bytes": 1, "layout": layout}
    assert need_from_json(body).layout is not None
    changed = {**body, **change, "layout": {**layout, **change.get("layout", {})}}
    with pytest.raises(ValueError, match="is no size"):
        need_from_json(changed)
