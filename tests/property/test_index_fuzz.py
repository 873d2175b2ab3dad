"""Whatever a checkpoint's files hold: it is read, or refused in lines that can be printed. Never anything else."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagelaunch.core.errors import CheckpointError
from stagelaunch.weights.index import CONFIG_NAME, INDEX_NAME, CheckpointIndex, read_index
from stagelaunch.weights.omni_spec import COMPONENTS, expected_tensors, kv_layout
from stagelaunch.weights.synthetic import TINY_CONFIG, write_shard

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def make_files() -> dict[str, bytes]:
    """A sound little checkpoint: three tensors in two shards."""
    shards = {ONE: {"thinker.a": np.ones((2, 3)), "talker.b": np.ones(4)}, TWO: {"talker.c": np.zeros((1, 2))}}
    files = {
        CONFIG_NAME: json.dumps({key: TINY_CONFIG[key] for key in ("architectures", "model_type")}).encode(),
        INDEX_NAME: json.dumps({"weight_map": {key: name for name, shard in shards.items() for key in shard}}).encode(),
    }
    with tempfile.TemporaryDirectory() as directory:
        for name, tensors in shards.items():
            write_shard(Path(directory, name), tensors)
            files[name] = Path(directory, name).read_bytes()
    return files


FILES = make_files()


def check_lines(error: CheckpointError) -> None:
    """A fault is a line, and a line can be printed."""
    lines = str(error).splitlines()
    assert error.faults
    assert len(lines) == len(error.faults)
    assert [line for line in lines if not line.isprintable()] == []


def read(files: dict[str, bytes]) -> CheckpointIndex | None:
    """The index; None if it was refused as it should be."""
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            Path(directory, name).write_bytes(content)
        try:
            return read_index(Path(directory))
        except CheckpointError as error:
            check_lines(error)
            return None


def test_the_sound_one_is_read() -> None:
    index = read(FILES)
    assert index is not None
    assert set(index.tensors) == {"thinker.a", "talker.b", "talker.c"}


@pytest.mark.parametrize("name", FILES)
def test_cut_anywhere_it_is_refused(name: str) -> None:
    for size in range(len(FILES[name])):
        assert read({**FILES, name: FILES[name][:size]}) is None, f"{name} cut at {size}"


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(FILES)), content=st.binary(max_size=400))
def test_random_bytes(name: str, content: bytes) -> None:
    assert read({**FILES, name: content}) is None


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(FILES)), data=st.data())
def test_bytes_replaced_inserted_or_removed(name: str, data: st.DataObject) -> None:
    content = FILES[name]
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, min(begin + 8, len(content))))
    index = read({**FILES, name: content[:begin] + data.draw(st.binary(max_size=8)) + content[end:]})
    if index is not None:  # a harmless change: what was read must still lie inside its file
        for entry in index.tensors.values():
            assert 8 < entry.begin <= entry.end <= len({**FILES, name: content}[entry.shard.name]) + 8


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800\n"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def encode_shard(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 40


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["thinker.a", "talker.b", "\ud800\n", ""]),
    entry=JSON | st.fixed_dictionaries({}, optional={"dtype": JSON, "shape": JSON, "data_offsets": JSON}),
)
def test_any_json_as_header_entry(name: str, entry: Any) -> None:
    read({**FILES, ONE: encode_shard({name: entry})})


@settings(max_examples=50, deadline=None)
@given(value=JSON)
def test_any_json_as_config_or_index(value: Any) -> None:
    for name in (CONFIG_NAME, INDEX_NAME):
        assert read({**FILES, name: json.dumps(value).encode()}) is None
    for shard in (value, [value]):
        weight_map = {"thinker.a": shard, str(value): ONE}
        read({**FILES, INDEX_NAME: json.dumps({"weight_map": weight_map}).encode()})


def paths(section: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in section.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths(value, (*prefix, key))
    return found


@settings(max_examples=100, deadline=None)
@given(path=st.sampled_from(paths(TINY_CONFIG)), value=JSON | st.integers(-2, 40))
def test_any_json_as_config_value(path: tuple[str, ...], value: Any) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    section = config
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    for component in COMPONENTS:
        try:
            shapes = expected_tensors(config, component)
            kv_layout(config, component, 16, 2)
        except CheckpointError as error:
            check_lines(error)
        else:
            assert all(type(size) is int and size > 0 for shape in shapes.values() for size in shape)
