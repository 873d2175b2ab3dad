"""A sound checkpoint is read; what is wrong with an unsound one is in test_checkpoint_faults.py."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stagelaunch.core.errors import CheckpointError
from stagelaunch.weights.faults import FaultList, printable
from stagelaunch.weights.index import read_index
from stagelaunch.weights.omni_spec import COMPONENTS, expected_tensors
from stagelaunch.weights.synthetic import TINY_CONFIG, random_tensor, write_shard


def test_every_tensor_is_where_the_index_says(tiny_checkpoint: Path) -> None:
    index = read_index(tiny_checkpoint)
    expected = {key: shape for name in COMPONENTS for key, shape in expected_tensors(TINY_CONFIG, name).items()}
    assert {key: entry.shape for key, entry in index.tensors.items()} == expected
    assert index.config == TINY_CONFIG
    weight_map = json.loads((tiny_checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    assert {key: entry.shard.name for key, entry in index.tensors.items()} == weight_map
    for key in ("thinker.lm_head.weight", "code2wav.decoder.0.conv.bias"):
        entry = index.tensors[key]
        with entry.shard.open("rb") as file:
            file.seek(entry.begin)
            content = np.frombuffer(file.read(entry.end - entry.begin), "<f4").reshape(entry.shape)
        assert np.array_equal(content, random_tensor(key, entry.shape, 0))


def test_safetensors_itself_reads_our_shards_alike(tiny_checkpoint: Path) -> None:
    safe_open = pytest.importorskip("safetensors").safe_open
    index = read_index(tiny_checkpoint)
    for shard in sorted(tiny_checkpoint.glob("*.safetensors")):
        with safe_open(shard, "np") as file:
            ours = {key: entry.shape for key, entry in index.tensors.items() if entry.shard == shard}
            assert {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()} == ours  # noqa: SIM118


def test_links_are_followed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The hub's cache holds links to blobs elsewhere."""
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert len(read_index(tmp_path).tensors) == len(read_index(tiny_checkpoint).tensors)


def test_one_file_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    write_shard(tmp_path / "model.safetensors", {"thinker.a": np.zeros((2, 3)), "thinker.b": np.zeros(())})
    tensors = read_index(tmp_path).tensors
    assert [(entry.shape, entry.end - entry.begin) for entry in tensors.values()] == [((2, 3), 24), ((), 4)]


def test_empty_tensors_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    write_shard(tmp_path / "model.safetensors", {"a": np.zeros((0, 3)), "b": np.zeros(2), "c": np.zeros((4, 0))})
    assert len(read_index(tmp_path).tensors) == 3


def test_no_descriptor_is_left_open(tiny_checkpoint: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, damaged)
    os.truncate(next(damaged.glob("*.safetensors")), 5)
    before = os.listdir("/proc/self/fd")
    read_index(tiny_checkpoint)
    with pytest.raises(CheckpointError):
        read_index(damaged)
    assert os.listdir("/proc/self/fd") == before


def test_the_index_survives_pickling(tiny_checkpoint: Path) -> None:
    index = read_index(tiny_checkpoint)
    assert pickle.loads(pickle.dumps(index)) == index


def test_only_the_reader_needs_torch() -> None:
    modules = ("index", "omni_spec", "validate", "plan", "synthetic")
    code = "; ".join(f"import stagelaunch.weights.{name}" for name in modules)
    code += "; import sys; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'safetensors')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_many_faults_of_a_kind_are_counted_not_listed(tmp_path: Path) -> None:
    faults = FaultList()
    for number in range(1239):
        faults.add("wrong things", tmp_path, f"key{number}", "is wrong")
    faults.add("other things", tmp_path, "k", "is odd")
    with pytest.raises(CheckpointError) as caught:
        faults.raise_if_any()
    lines = str(caught.value).splitlines()
    assert len(lines) == 7
    assert lines[5].endswith("... and 1,234 more: wrong things")


@pytest.mark.parametrize(
    ("raw", "shown"), [("a.b", "a.b"), ("a\nb", r"a\nb"), ("\ud800", r"\ud800"), ("x" * 300, "x" * 197 + "...")]
)
def test_names_from_files_are_shown_on_one_line(raw: str, shown: str) -> None:
    assert printable(raw) == shown
