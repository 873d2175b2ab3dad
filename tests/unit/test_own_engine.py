"""How an engine is found, what is said when it is not, and the shipped example of one on a simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.errors import EngineNotFoundError, ExitCode
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.units import MIB
from stagelaunch.engines.base import BUILT_IN, create_engine

ROOT = Path(__file__).parents[2]
SPEC = EngineSpec("decoder", Path("none"), "float32", 4, 256, 64, 16, (4, 2, 1), {"layers": "3"})


def refusal(name: str) -> str:
    with pytest.raises(EngineNotFoundError, match=f"cannot load engine '{name}': ") as caught:
        create_engine(name, SPEC)
    # A service manager does not try it again.
    assert (caught.value.exit_code, caught.value.retry) == (ExitCode.CONFIG, False)
    return str(caught.value)


def test_an_engine_that_cannot_be_loaded_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "engine_here.py").write_text("SIZE = 3\nclass Needy:\n    preload = ('no_such_library.part',)\n")
    (tmp_path / "engine_broken.py").write_text("import math\nmath.no_such_name\n")
    for name in ("no_such_engine:Mine", "no_such_engine.part:Mine", "engine_here.part:Mine"):
        said = refusal(name)
        assert "No module named " in said
        assert "on PYTHONPATH" in said
        assert "has no class" not in said
    for name in ("Mine", "SIZE"):
        said = refusal(f"engine_here:{name}")
        assert f"module engine_here ({tmp_path}/engine_here.py) has no class {name}; name a class that it has" in said
        assert "PYTHONPATH" not in said
    # It is there, and what it needs is not.
    said = refusal("engine_here:Needy")
    assert "what it imports is not there: No module named 'no_such_library'; install that" in said
    # The built-in one's are an extra of ours.
    monkeypatch.setitem(BUILT_IN, "built-in", "engine_here:Needy")
    assert "no_such_library'; pip install 'stagelaunch[torch]' into" in refusal("built-in")
    # Its own fault is told as such, not as an engine that is missing.
    with pytest.raises(AttributeError, match="no_such_name"):
        create_engine("engine_broken:Mine", SPEC)


def test_the_shipped_engine_takes_what_it_says_and_gives_all_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from stagelaunch.devices.simulated import SimulatedDevice

    monkeypatch.syspath_prepend(ROOT / "configs")
    device = SimulatedDevice(SimulatedMachine(tmp_path / "devices", {0: 512 * MIB}, 0), 0)
    device.create_context()
    engine = create_engine("own_engine:OwnEngine", SPEC)
    engine.close()
    engine.allocate_weights(device)
    weights_bytes, told = device.memory().allocated_bytes, [(0, 1)]
    engine.read_weights(lambda done, total: told.append((done, total)))
    assert told[-1] == (weights_bytes, weights_bytes)
    engine.run_largest_batch()
    assert device.memory().allocated_bytes == weights_bytes
    layout = engine.kv_layout
    assert layout is not None
    blocks = layout.blocks_for(SPEC.max_model_len)
    engine.allocate_kv(blocks)
    assert device.memory().allocated_bytes == weights_bytes + blocks * layout.block_bytes
    eager = engine.probe()
    for size in SPEC.capture_sizes:
        engine.capture(size)
    graph = engine.probe()
    assert (eager.through_graph, graph.through_graph, graph.batch_size) == (False, True, 1)
    assert (eager.matches, graph.matches, graph.output_shape) == (True, True, (1, 1000))
    engine.close()
    engine.close()
    device.empty_cache()
    assert (device.memory().allocated_bytes, device.free_bytes()) == (0, 512 * MIB)
    device.close()
