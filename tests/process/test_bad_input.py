"""What a user can get wrong: one clear line, the documented exit code, and nothing started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployments import Ran, Site, light_stage

from stagelaunch.config_file import load_deployment
from stagelaunch.devices.simfile import SimulatedFile


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def assert_refused(ran: Ran, code: int, *words: str) -> None:
    assert ran.code == code, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "started" not in ran.stderr
    assert ran.stdout == ""
    for word in words:
        assert word in ran.stderr


def omni_site(site: Site, checkpoint: Path) -> Site:
    site.stages = [
        light_stage(i, name, device, engine="qwen3-omni", dtype="auto")
        for i, (name, device) in enumerate([("thinker", 0), ("talker", 1), ("code2wav", 1)])
    ]
    site.top["model"] = str(checkpoint)
    return site


def edit_index(model: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = model / "model.safetensors.index.json"
    body = json.loads(path.read_text())
    change(body["weight_map"])
    path.write_text(json.dumps(body))


def edit_config(model: Path, *keys: str, value: Any) -> None:
    path = model / "config.json"
    body = json.loads(path.read_text())
    section = body
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    path.write_text(json.dumps(body))


def truncate(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[0]
    body = shard.read_bytes()
    shard.write_bytes(body[: len(body) - 100])


def empty(model: Path) -> None:
    for path in model.iterdir():
        path.unlink()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing directory": (lambda model: shutil.rmtree(model), "model"),
    "empty directory": (empty, "is empty"),
    "missing shard": (lambda model: sorted(model.glob("*.safetensors"))[0].unlink(), "safetensors"),
    "truncated shard": (truncate, "safetensors"),
    "index names an absent tensor": (
        lambda model: edit_index(model, lambda names: names.update({"thinker.nothing": min(names.values())})),
        "thinker.nothing",
    ),
    "unexpected key and missing key": (
        lambda model: edit_config(model, "thinker_config", "text_config", "num_hidden_layers", value=1),
        "thinker.model.layers",
    ),
    "wrong shape": (
        lambda model: edit_config(model, "talker_config", "text_config", "vocab_size", value=17),
        "talker",
    ),
    "wrong dtype": (lambda model: edit_config(model, "dtype", value="bfloat16"), "bfloat16"),
    "another model": (lambda model: edit_config(model, "model_type", value="llama"), "llama"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_before_anything_starts(site: Site, tiny_checkpoint: Path, damage: str) -> None:
    model = site.directory / "model"
    shutil.copytree(tiny_checkpoint, model)
    omni_site(site, model)
    change, word = DAMAGE[damage]
    change(model)
    ran = site.up()
    assert_refused(ran, 78, word, str(model))


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            {"stages": [light_stage(0, "a", 0, utilization=0.7), light_stage(1, "b", 0, utilization=0.7)]},
            78,
            ("device 0", "short by"),
        ),
        ({"stages": [light_stage(0, "a", 7)]}, 69, ("device 7", "0, 1")),
        ({"stages": [light_stage(0, "a", 0, devices=[0, 1])]}, 78, ("one device",)),
        ({"stages": [light_stage(0, "a", 0, env={"LD_PRELOAD": "x"})]}, 78, ("LD_PRELOAD", "process starts")),
        ({"order": "random"}, 78, ("order", "random")),
        ({"nmae": "x"}, 78, ("nmae", "name")),
        ({"timeouts": {"phase": "50s", "stage": "20s"}}, 78, ("phase", "stage")),
        ({"lock_dir": "/proc/stagelaunch"}, 78, ("/proc/stagelaunch", "lock directory")),
        ({"runtime_dir": "/proc/stagelaunch"}, 78, ("/proc/stagelaunch", "runtime")),
        ({"backend": "cuda", "simulated": None}, 69, ("driver",)),
    ],
)  # fmt: skip
def test_a_wrong_deployment_is_refused(site: Site, change: dict[str, Any], code: int, words: tuple[str, ...]) -> None:
    site.stages = change.pop("stages", site.stages)
    site.top.update(change)
    if site.top.get("simulated", ...) is None:
        site.write()
        text = "\n".join(line for line in site.config.read_text().splitlines() if not line.startswith("simulated"))
        site.config.write_text(text)
        ran = site.run("up", str(site.config))
    else:
        ran = site.up()
    assert_refused(ran, code, *words)


def test_all_faults_of_a_file_come_at_once_with_their_lines(site: Site) -> None:
    site.write()
    text = site.config.read_text() + "order: sideways\nreserve: 5 apples\nwhatever: 1\n"
    site.config.write_text(text)
    ran = site.run("up", str(site.config))
    lines = text.splitlines()
    for key in ("order: sideways", "reserve: 5 apples", "whatever: 1"):
        number = lines.index(key) + 1
        assert f"site.yaml:{number}: {key.partition(':')[0]}" in ran.stderr
    assert ran.code == 78


def open_devices(site: Site) -> SimulatedFile:
    site.write()
    machine = load_deployment(site.config).machine(site.directory / "devices")
    assert machine is not None
    return SimulatedFile.open(machine)


def test_memory_held_by_others_is_a_refusal_for_now(site: Site) -> None:
    devices = open_devices(site)
    devices.set_foreign_bytes(1, 512 << 20)
    ran = site.up()
    devices.close()
    assert_refused(ran, 2, "device 1", "512.00 MiB is free now")


def test_memory_that_does_not_come_back_is_named(site: Site) -> None:
    process = site.start("up", str(site.write()))
    assert process.stdout is not None
    assert "site: ready" in process.stdout.readline()
    devices = open_devices(site)
    # As a driver that keeps what a killed process had.
    devices.set_foreign_bytes(0, 100 << 20)
    devices.close()
    ran = site.run("down", str(site.config))
    _, stderr = process.communicate(timeout=60)
    assert (ran.code, process.returncode) == (71, 71)
    assert "device 0: 100.00 MiB less free" in ran.stderr
    assert "LEFT BEHIND" in stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 64),
        (("fly",), 64),
        (("up",), 64),
        (("up", "--wait", "x.yaml"), 64),
        (("up", "not-a-config"), 64),
        (("up", "nowhere.yaml"), 78),
        (("status", "a/b"), 64),
        (("down", "nobody"), 1),
        (("probe", "nobody"), 1),
        (("status", "nobody"), 1),
        (("--version",), 0),
    ],
)
def test_command_line_mistakes(site: Site, arguments: tuple[str, ...], code: int) -> None:
    ran = site.run(*arguments)
    assert ran.code == code, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", ["run.json", "state.json"])
def test_a_runtime_directory_that_cannot_be_written_is_the_configs_fault(tmp_path: Path, name: str) -> None:
    site = Site(tmp_path)
    site.write()
    (tmp_path / "run" / "site" / name).mkdir(parents=True)
    ran = site.run("up", str(site.config))
    assert ran.code == 78
    assert f"run/site/{name}: cannot be written: Is a directory; make room there" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert [path.name for path in (tmp_path / "run" / "site").iterdir() if path.name.startswith(f".{name}")] == []
