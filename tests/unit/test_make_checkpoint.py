"""The generator: all or nothing, the same bytes from the same seed, and it never removes what is not its own."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagelaunch.core.errors import UsageError
from stagelaunch.weights import synthetic
from stagelaunch.weights.index import read_index
from stagelaunch.weights.omni_spec import COMPONENTS, expected_tensors
from stagelaunch.weights.synthetic import TINY_CONFIG, random_tensor, write_checkpoint
from stagelaunch.weights.validate import validate

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_checkpoint.py"


def small_config() -> dict[str, Any]:
    config = copy.deepcopy(TINY_CONFIG)
    config["thinker_config"]["text_config"].update(vocab_size=64, num_hidden_layers=1, num_experts=2)
    config["talker_config"]["code_predictor_config"]["vocab_size"] = 64
    return config


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, seed=seed, config=small_config())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_what_it_writes_is_valid(tmp_path: Path) -> None:
    total_bytes = write_checkpoint(tmp_path / "new" / "model", config=small_config())
    index = read_index(tmp_path / "new" / "model")
    validate(index, COMPONENTS)
    assert total_bytes == sum(entry.end - entry.begin for entry in index.tensors.values())
    metadata = json.loads((index.model_dir / "model.safetensors.index.json").read_text())["metadata"]
    assert metadata == {"total_size": total_bytes}


def test_no_two_tensors_are_alike() -> None:
    """Or a loader that swaps two would go unnoticed."""
    shapes = {k: s for component in COMPONENTS for k, s in expected_tensors(small_config(), component).items()}
    assert len({random_tensor(key, shape, 0).tobytes() for key, shape in shapes.items()}) == len(shapes)


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", config=small_config())
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", config=small_config())
    assert contents(tmp_path / "empty") == contents(tmp_path / "model")


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="is not empty; use --force"):
        write_checkpoint(tmp_path / "model", config=small_config())
    with pytest.raises(UsageError, match="does not hold a checkpoint"):
        write_checkpoint(tmp_path / "model", config=small_config(), force=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a directory"):
        write_checkpoint(tmp_path / "file", config=small_config(), force=True)
    assert contents(tmp_path / "model") == {"thesis.txt": b"years of work"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


def test_force_replaces_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", seed=1, config=small_config())
    old = contents(tmp_path / "model")
    write_checkpoint(tmp_path / "model", seed=2, config=small_config(), force=True)
    assert contents(tmp_path / "model") != old
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, tensors: dict[str, np.ndarray]) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic, "write_shard", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_checkpoint(tmp_path / "model", config=small_config())
    assert list(tmp_path.iterdir()) == []


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_the_script(tmp_path: Path) -> None:
    first = run_script("--out", str(tmp_path / "model"))
    assert (first.returncode, first.stdout) == (0, "")
    assert "MiB of weights" in first.stderr
    validate(read_index(tmp_path / "model"), COMPONENTS)
    again = run_script("--out", str(tmp_path / "model"))
    assert again.returncode == 64
    assert again.stderr.count("\n") == 1
    assert f"cannot write {tmp_path / 'model'}: it exists and is not empty; use --force" in again.stderr


@pytest.mark.parametrize("arguments", [[], ["--out", "x", "--size", "huge"], ["--out", "x", "--seed", "-1"]])
def test_wrong_usage_is_one_line(arguments: list[str]) -> None:
    done = run_script(*arguments)
    assert done.returncode == 64
    assert len(done.stderr.splitlines()) == 1


def test_bfloat16_is_rounded_to_nearest_even(tmp_path: Path) -> None:
    config = {**small_config(), "dtype": "bfloat16"}
    total_bytes = write_checkpoint(tmp_path / "half", seed=1, config=config)
    assert total_bytes * 2 == write_checkpoint(tmp_path / "whole", seed=1, config=small_config())
    index = read_index(tmp_path / "half")
    validate(index, dict.fromkeys(COMPONENTS, "bfloat16"))
    torch = pytest.importorskip("torch")
    for entry in list(index.tensors.values())[::20]:
        content = entry.shard.read_bytes()[entry.begin : entry.end]
        stored = torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(entry.shape)
        assert torch.equal(stored, torch.from_numpy(random_tensor(entry.name, entry.shape, 1)).bfloat16())


def test_the_real_size_is_written_as_headers_only(tmp_path: Path) -> None:
    refused = run_script("--out", str(tmp_path / "model"), "--size", "30b")
    assert (refused.returncode, list(tmp_path.iterdir())) == (64, [])
    assert "add --headers-only" in refused.stderr
    done = run_script("--out", str(tmp_path / "model"), "--size", "30b", "--headers-only")
    assert done.returncode == 0
    assert "headers only, no data, of 65.68 GiB" in done.stderr
    index = read_index(tmp_path / "model")
    assert index.headers_only
    assert len({entry.shard for entry in index.tensors.values()}) == 15
    assert len(index.tensors) == 28_010
