"""Every way a checkpoint can be damaged: one clear line that names the file and the key, and never a traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagelaunch.core.errors import CheckpointError, ExitCode
from stagelaunch.weights.index import CONFIG_NAME, INDEX_NAME, read_index
from stagelaunch.weights.omni_spec import COMPONENTS
from stagelaunch.weights.validate import validate

SHARDS = [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
KEY = "talker.codec_head.weight"
"""Lies in the last shard, beside code2wav."""


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage: its shards are links, see ``own``."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in SHARDS:
        (directory / name).symlink_to(tiny_checkpoint / name)
    for name in (CONFIG_NAME, INDEX_NAME):
        shutil.copy(tiny_checkpoint / name, directory)
    return directory


def own(path: Path) -> Path:
    """``path`` as a file of its own, to be written to."""
    source = path.resolve()
    path.unlink()
    shutil.copy(source, path)
    return path


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite a JSON file with what ``change`` returns, or what it did to the value if it returns nothing."""
    value = json.loads(path.read_text())
    changed = change(value)
    path.write_text(json.dumps(value if changed is None else changed))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a shard's header; its data stay."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    own(path).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def config(path: str, value: Any) -> Callable[[Path], None]:
    """Damage: the value at a dotted path of config.json; ``...`` removes it."""

    def damage(directory: Path) -> None:
        def change(section: dict[str, Any]) -> None:
            *parents, key = path.split(".")
            for parent in parents:
                section = section[parent]
            if value is ...:
                del section[key]
            else:
                section[key] = value

        edit_json(directory / CONFIG_NAME, change)

    return damage


def index(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda directory: edit_json(directory / INDEX_NAME, change)


def header(change: Callable[[dict[str, Any]], None], shard: int = 4) -> Callable[[Path], None]:
    return lambda directory: edit_header(directory / SHARDS[shard - 1], change)


def raw(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).write_bytes(content)

    return damage


def truncated(shard: int, size: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = own(directory / SHARDS[shard - 1])
        os.truncate(path, size(path.stat().st_size))

    return damage


def remove(*names: str) -> Callable[[Path], None]:
    return lambda directory: [(directory / name).unlink() for name in names] and None


def replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return damage


def sparse(length: int, size: int) -> bytes:
    return length.to_bytes(8, "little") + b"\0" * size


def rename_everywhere(old: str, new: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        edit_json(directory / INDEX_NAME, lambda value: value["weight_map"].update({new: value["weight_map"].pop(old)}))
        edit_header(directory / SHARDS[3], lambda value: value.update({new: value.pop(old)}))

    return damage


def drop_component(directory: Path) -> None:
    """No code2wav: its tensors go by another name."""

    def rename(names: dict[str, Any]) -> None:
        for key in [key for key in names if key.startswith("code2wav.")]:
            names["vocoder" + key.removeprefix("code2wav")] = names.pop(key)

    edit_json(directory / INDEX_NAME, lambda value: rename(value["weight_map"]))
    edit_header(directory / SHARDS[3], rename)


def shift(key: str, by: int) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        value[key]["data_offsets"] = [offset + by for offset in value[key]["data_offsets"]]

    return change


def transpose(value: dict[str, Any]) -> None:
    value[KEY]["shape"].reverse()


def duplicate(directory: Path) -> None:
    path = directory / SHARDS[3]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entry = json.dumps({KEY: json.loads(content[8 : 8 + length])[KEY]})[1:-1].encode()
    text = b"{" + entry + b"," + content[9 : 8 + length]
    own(path).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def in_two_shards(directory: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    edit_header(directory / SHARDS[0], lambda value: value.update({KEY: entry}))


S1, S4 = SHARDS[0], SHARDS[3]
Damage = Callable[[Path], None]

# name: (damage, file, key or None, what the line says)
DAMAGES: dict[str, tuple[Damage, str, str | None, str]] = {
    "no config": (remove(CONFIG_NAME), CONFIG_NAME, None, "is missing"),
    "config is no JSON": (raw(CONFIG_NAME, b'{\n"a": 1,\n'), CONFIG_NAME + ":3", None, "is not JSON"),
    "config is no text": (raw(CONFIG_NAME, b"\xff\xfe\xfd"), CONFIG_NAME, None, "is not JSON"),
    "config is nested without end": (raw(CONFIG_NAME, b"[" * 100_000), CONFIG_NAME, None, "is not JSON"),
    "config is a list": (raw(CONFIG_NAME, b"[]"), CONFIG_NAME, None, "is not a JSON object"),
    "config is absurdly large": (raw(CONFIG_NAME, b" " * 100_000_001), CONFIG_NAME, None, "is larger than"),
    "config is a directory": (replace(CONFIG_NAME, Path.mkdir), CONFIG_NAME, None, "is not a regular file"),
    "another model type": (config("model_type", "llama"), CONFIG_NAME, "model_type", "'llama', another model"),
    "no model type": (config("model_type", ...), CONFIG_NAME, "model_type", "another model"),
    "another architecture": (config("architectures", ["Llama"]), CONFIG_NAME, "architectures", "another model"),
    "no weights": (remove(INDEX_NAME, *SHARDS), "model", None, "holds no weights"),
    "no index": (remove(INDEX_NAME), "model", None, "holds no weights"),
    "index is no JSON": (raw(INDEX_NAME, b"weights"), INDEX_NAME + ":1", None, "is not JSON"),
    "no weight_map": (index(lambda v: v.pop("weight_map") and None), INDEX_NAME, "weight_map", "is missing"),
    "weight_map is a list": (index(lambda v: {"weight_map": [KEY]}), INDEX_NAME, "weight_map", "not a filled object"),
    "shard outside": (
        index(lambda v: v["weight_map"].update({KEY: "../" + S4})), INDEX_NAME, KEY, "not a file inside the directory"
    ),
    "shard at the root": (
        index(lambda v: v["weight_map"].update({KEY: "/etc/passwd"})), INDEX_NAME, KEY, "not a file inside"
    ),
    "shard with a NUL": (index(lambda v: v["weight_map"].update({KEY: "a\0b"})), INDEX_NAME, KEY, "not a file inside"),
    "shard is a number": (index(lambda v: v["weight_map"].update({KEY: 4})), INDEX_NAME, KEY, "not a file inside"),
    "shard with an endless name": (
        index(lambda v: v["weight_map"].update({KEY: "a" * 5000})), "aaa...", None, "opened: File name too long"
    ),
    "missing shard": (remove(S4), S4, None, "is missing"),
    "shard is a directory": (replace(S4, Path.mkdir), S4, None, "is not a regular file"),
    "shard is a pipe": (replace(S4, os.mkfifo), S4, None, "is not a regular file"),
    "shard cut in its data": (truncated(4, lambda size: size - 1), S4, None, "is cut short"),
    "shard cut in its header": (truncated(4, lambda size: 100), S4, None, "inside its header"),
    "shard cut in its first bytes": (truncated(4, lambda size: 7), S4, None, "inside its header"),
    "empty shard": (truncated(4, lambda size: 0), S4, None, "inside its header"),
    "overlong shard": (truncated(4, lambda size: size + 3), S4, None, "3 bytes longer"),
    "absurd header length": (raw(S4, sparse(2**60, 64)), S4, None, "inside its header"),
    "header over the limit": (raw(S4, sparse(100_000_001, 100_000_002)), S4, None, "claims a header of 100,000,001"),
    "header is no JSON": (raw(S4, sparse(16, 64)), S4, None, "header that is no JSON object"),
    "header is a list": (raw(S4, (2).to_bytes(8, "little") + b"[]"), S4, None, "header that is no JSON object"),
    "entry is a number": (header(lambda v: v.update({KEY: 7})), S4, KEY, "entry that is not an object"),
    "unknown dtype": (header(lambda v: v[KEY].update(dtype="F31")), S4, KEY, "unknown dtype 'F31'"),
    "negative shape": (header(lambda v: v[KEY].update(shape=[-1, 4])), S4, KEY, "impossible shape"),
    "shape of truths": (header(lambda v: v[KEY].update(shape=[True])), S4, KEY, "impossible shape"),
    "endless shape": (header(lambda v: v[KEY].update(shape=[1] * 17)), S4, KEY, "impossible shape"),
    "offsets backwards": (header(lambda v: v[KEY].update(data_offsets=[8, 4])), S4, KEY, "impossible data_offsets"),
    "one offset": (header(lambda v: v[KEY].update(data_offsets=[8])), S4, KEY, "impossible data_offsets"),
    "dtype and bytes differ": (header(lambda v: v[KEY].update(dtype="BF16")), S4, KEY, "data_offsets span"),
    "overlap": (header(shift(KEY, -4)), S4, KEY, "overlaps the tensor before it"),
    "gap": (header(shift(KEY, 4)), S4, KEY, "leaves a gap before it"),
    "twice in a header": (duplicate, S4, KEY, "is twice in the header"),
    "in two shards": (in_two_shards, S4, KEY, "is also in " + S1),
    "not in its shard": (
        index(lambda v: v["weight_map"].update({KEY: S1})), INDEX_NAME, KEY, f"is not in {S1}, where the index puts it"
    ),
    "in no shard": (
        index(lambda v: v["weight_map"].update({"talker.ghost": S4})), INDEX_NAME, "talker.ghost", f"is not in {S4}"
    ),
    "not in the index": (index(lambda v: v["weight_map"].pop(KEY) and None), S4, KEY, "is not in " + INDEX_NAME),
    # From here on the files are whole, but not what the config describes.
    "missing tensor": (rename_everywhere(KEY, "talker.other"), INDEX_NAME, KEY, "is missing"),
    "unexpected tensor": (rename_everywhere(KEY, "talker.other"), S4, "talker.other", "is unexpected"),
    "foreign tensor": (rename_everywhere(KEY, "vocoder.other"), S4, "vocoder.other", "belongs to none of"),
    "no such component": (drop_component, "model", "code2wav.*", "holds no tensor of the code2wav"),
    "wrong shape": (header(transpose), S4, KEY, "has shape [128, 1088], config.json calls for [1088, 128]"),
    "wrong dtype": (header(lambda v: v[KEY].update(dtype="I32")), S4, KEY, "is I32, config.json says float32"),
    "config says another dtype": (config("dtype", "bfloat16"), "model", "talker.*", "is float32, config.json says"),
    "config says no dtype": (config("dtype", ...), CONFIG_NAME, "torch_dtype", "is None"),
    "another size": (
        config("talker_config.text_config.vocab_size", 2000), S4, KEY, "config.json calls for [2000, 128]"
    ),
    "more layers than tensors": (
        config("talker_config.text_config.num_hidden_layers", 4), INDEX_NAME, "talker.model.layers.3.", "is missing"
    ),
    "fewer layers than tensors": (
        config("code2wav_config.num_hidden_layers", 1), S4, "code2wav.pre_transformer.layers.1.", "is unexpected"
    ),
    "config value of a wrong kind": (
        config("thinker_config.text_config.hidden_size", "big"),
        CONFIG_NAME,
        "thinker_config.text_config.hidden_size",
        "not a whole number",
    ),
}  # fmt: skip


def faults_of(directory: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        validate(read_index(directory), COMPONENTS)
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value).splitlines()


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(checkpoint: Path, name: str) -> None:
    damage, file, key, says = DAMAGES[name]
    damage(checkpoint)
    lines = faults_of(checkpoint)
    place = (
        re.escape(file).replace(re.escape("aaa..."), r"a+\.\.\.")
        + r"(:\d+)?: "
        + ("" if key is None else re.escape(key))
    )
    matching = [line for line in lines if re.search(place, line) and says in line]
    assert matching, lines
    assert all(re.search(r"; \w", line) or "more:" in line for line in lines), lines
    assert all(len(line) < 600 for line in lines)


def test_a_sound_checkpoint_has_no_faults(checkpoint: Path) -> None:
    validate(read_index(checkpoint), COMPONENTS)


def test_a_damage_in_the_middle_is_the_only_line(checkpoint: Path) -> None:
    """No consequences are listed: one fault, one line."""
    for name in ("missing shard", "shard cut in its data", "unknown dtype"):
        fresh = checkpoint.with_name(name)
        shutil.copytree(checkpoint, fresh, symlinks=True)
        DAMAGES[name][0](fresh)
        assert len(faults_of(fresh)) == 1, name


def test_all_faults_at_once(checkpoint: Path) -> None:
    for name in ("another model type", "missing shard", "shard outside"):
        DAMAGES[name][0](checkpoint)
    truncated(1, lambda size: 100)(checkpoint)
    text = "\n".join(faults_of(checkpoint))
    for says in ("'llama'", f"{S4}: is missing", "not a file inside", f"{S1}: is cut short"):
        assert says in text


def test_many_faults_of_a_kind_are_counted(checkpoint: Path) -> None:
    config("thinker_config.text_config.hidden_size", 128)(checkpoint)
    lines = faults_of(checkpoint)
    assert len(lines) == 6
    assert re.search(r"\.\.\. and \d+ more: wrong shapes in the thinker", lines[-1])


def test_a_model_in_another_dtype_is_one_line_per_component(checkpoint: Path) -> None:
    config("dtype", "bfloat16")(checkpoint)
    assert len(faults_of(checkpoint)) == 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such directory"),
        (Path.touch, "is not a directory"),
        (Path.mkdir, "is empty"),
    ],
    ids=["missing", "file", "empty"],
)
def test_no_model_directory(tmp_path: Path, make: Callable[[Path], object], says: str) -> None:
    make(tmp_path / "nowhere")
    lines = faults_of(tmp_path / "nowhere")
    assert len(lines) == 1
    assert str(tmp_path / "nowhere") in lines[0]
    assert says in lines[0]


@pytest.mark.parametrize("name", [CONFIG_NAME, INDEX_NAME, S4])
def test_files_that_may_not_be_read(checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by a fake, because root may read everything."""
    real_open = os.open

    def forbidding(path: Any, flags: int, mode: int = 0o777) -> int:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", forbidding)
    lines = faults_of(checkpoint)
    assert len(lines) == 1
    assert f"{name}: cannot be opened: Permission denied" in lines[0]


def test_a_file_that_is_gone_as_soon_as_it_is_open_is_a_fault(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int) -> os.stat_result:
        raise OSError(116, "Stale file handle")

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing)
        lines = faults_of(checkpoint)
    assert len(lines) == 2
    assert f"{CONFIG_NAME}: cannot be looked at: Stale file handle; check the disk" in lines[0]
    assert os.listdir("/proc/self/fd") == before


def test_a_read_that_fails_is_a_fault(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, length: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", failing)
    lines = faults_of(checkpoint)
    assert len(lines) == 4
    assert f"{S1}: cannot be read: Input/output error" in lines[0]
