from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from stagelaunch.config_file import MAX_FILE_BYTES, LoadedDeployment, load_deployment
from stagelaunch.core.config import Deployment, Stage, Timeouts, json_schema, key_names, to_raw
from stagelaunch.core.errors import ConfigError, ExitCode
from stagelaunch.core.units import GIB, MIB

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

GOOD = """\
name: demo
model: ../model
backend: simulated
order: overlap
reserve: 16MiB
timeouts:
  phase: 60s
  stage: 120s
  boot: 180s
  lock: 60s
  stop: 5s
simulated:
  devices: {0: 1GiB, 1: 1GiB}
  context: 64MiB
  transfer_rate: 2GiB/s
stages:
  - id: 0
    name: thinker
    component: thinker
    devices: [0]
    utilization: 0.9
    max_num_seqs: 6
    max_num_batched_tokens: 256
    max_model_len: 256
    dtype: float32
    env: {OMP_NUM_THREADS: "1"}
  - id: 1
    name: talker
    component: talker
    devices: [0, 1]
    budget: 512MiB
    max_num_seqs: 4
    max_num_batched_tokens: 256
    max_model_len: 256
    graphs: off
"""


def load(tmp_path: Path, body: str | bytes, name: str = "demo.yaml") -> LoadedDeployment:
    path = tmp_path / name
    path.write_bytes(body.encode() if isinstance(body, str) else body)
    return load_deployment(path)


def faults(tmp_path: Path, body: str | bytes) -> list[tuple[int | None, str | None, str]]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, body)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert len(str(caught.value).splitlines()) == len(caught.value.faults)
    assert all(fault.file == str(tmp_path / "demo.yaml") for fault in caught.value.faults)
    return [(fault.line, fault.key, fault.text) for fault in caught.value.faults]


def test_a_good_file_says_what_it_says(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD)
    deployment = loaded.deployment
    assert (deployment.name, deployment.backend, deployment.order) == ("demo", "simulated", "overlap")
    assert deployment.reserve_bytes == 16 * MIB
    assert deployment.timeouts == Timeouts.model_validate(
        {"phase": "60s", "stage": "2m", "boot": "180s", "lock": "60000ms", "stop": "5s"}
    )
    assert deployment.simulated is not None
    assert deployment.simulated.devices == {0: GIB, 1: GIB}
    assert deployment.simulated.transfer_bytes_per_s == 2.0 * GIB
    thinker, talker = deployment.stages
    assert (thinker.demand, talker.demand) == (0.9, 512 * MIB)
    assert (thinker.capture_sizes, talker.capture_sizes) == ((6, 4, 2, 1), ())
    assert thinker.env == {"OMP_NUM_THREADS": "1"}
    assert deployment.stage_devices == {0: (0,), 1: (0, 1)}
    assert deployment.stage(1) is talker
    assert loaded.model_dir == tmp_path.parent / "model"


def test_defaults_are_the_documented_ones(tmp_path: Path) -> None:
    lines = [
        line
        for line in GOOD.splitlines()
        if not line.lstrip().startswith(("order", "reserve", "graphs", "dtype", "env"))
    ]
    text = "\n".join(lines).replace("  phase: 60s\n  stage: 120s\n  boot: 180s\n  lock: 60s\n  stop: 5s\n", "  {}\n")
    deployment = load(tmp_path, text.replace("  context: 64MiB\n  transfer_rate: 2GiB/s\n", "")).deployment
    assert (deployment.order, deployment.reserve_bytes) == ("overlap", 2 * GIB)
    assert deployment.timeouts.model_dump() == {
        "phase_s": 300.0,
        "stage_s": 600.0,
        "boot_s": 900.0,
        "lock_s": 300.0,
        "heartbeat_s": 30.0,
        "stop_s": 15.0,
        "stop_booting_s": 3.0,
        "memory_s": 15.0,
        "driver_s": 30.0,
    }
    assert (deployment.lock_dir, deployment.runtime_dir) == ("/run/lock/stagelaunch", None)
    assert deployment.simulated is not None
    assert (deployment.simulated.context_bytes, deployment.simulated.transfer_bytes_per_s) == (64 * MIB, None)
    stage = deployment.stages[0]
    assert (stage.engine, stage.block_size, stage.dtype, stage.graphs) == ("qwen3-omni", 16, "auto", None)


@pytest.mark.parametrize(
    ("graphs", "max_num_seqs", "sizes"),
    [
        (None, 1, (1,)),
        (None, 4, (4, 2, 1)),
        (None, 6, (6, 4, 2, 1)),
        (None, 64, (64, 32, 16, 8, 4, 2, 1)),
        ("off", 64, ()),
        ([1, 3, 2], 3, (3, 2, 1)),
    ],
)
def test_capture_sizes(graphs: Any, max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    stage = Stage.model_validate(
        {
            "id": 0,
            "name": "s",
            "devices": [0],
            "component": "talker",
            "utilization": 1,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 64,
            "max_model_len": 64,
            "graphs": graphs,
        }
    )
    assert stage.capture_sizes == sizes


# (text to replace in GOOD, its replacement, line, key, part of the text)
BAD: list[tuple[str, str, int | None, str | None, str]] = [
    ("order:", "oder:", 4, "oder", "did you mean 'order'?"),
    ("reserve:", "reserve_bytes:", 5, "reserve_bytes", "did you mean 'reserve'?"),
    ("order: overlap", "utilization: 0.5", 4, "utilization", "it belongs to each stage"),
    ("  stop:", "  stap:", 11, "timeouts.stap", "did you mean 'stop'?"),
    ("    max_num_seqs: 6", "    max-num-seq: 6\n    max_num_seqs: 6", 22, "stages[0].max-num-seq", "'max_num_seqs'?"),
    ("order: overlap", "7: x", 4, "[7]", "unknown key"),
    ("order: overlap", "name: again", 4, "name", "given twice, first in line 1"),
    ("    name: talker", "    name: a\n    name: b", 29, "stages[1].name", "given twice, first in line 28"),
    ("{0: 1GiB, 1: 1GiB}", "{0: 1GiB, 0: 1GiB}", 13, "simulated.devices[0]", "given twice"),
    ("{0: 1GiB, 1: 1GiB}", '{0: 1GiB, "0": 1GiB}', 13, "simulated.devices", "lists device 0 twice"),
    ("{0: 1GiB, 1: 1GiB}", "{a: 1GiB}", 13, "simulated.devices.a", "not a device number"),
    ("{0: 1GiB, 1: 1GiB}", "{0: 0}", 13, "simulated.devices[0]", "not above zero"),
    ("{0: 1GiB, 1: 1GiB}", "{}", 13, "simulated.devices", "is empty"),
    ("{0: 1GiB, 1: 1GiB}", "[1GiB]", 13, "simulated.devices", "is not a section"),
    ("2GiB/s", "2GiB", 15, "simulated.transfer_rate", "not a rate like 2GiB/s"),
    ("name: demo", "name: 12", 1, "name", 'quote it: "12"'),
    ("name: demo", "name: yes", 1, "name", "yes is read by YAML as true/false"),
    ("name: demo", "name: 2024-01-01", 1, "name", "is read by YAML as a date"),
    ("name: demo", "name:", 1, "name", "is empty"),
    ("name: demo", "name: a/b", 1, "name", "not a name"),
    ("name: demo", f"name: {'a' * 49}", 1, "name", "not a name"),
    ("name: demo\n", "", 1, "name", "is missing"),
    ("../model", "[a]", 2, "model", "is not a text"),
    ("../model", '"a\\0b"', 2, "model", "unprintable"),
    ("../model", '" "', 2, "model", "is empty"),
    ("backend: simulated", "backend: simulatd", 3, "backend", "did you mean 'simulated'?"),
    ("backend: simulated", "backend: cuda", 12, "simulated", "does not go with backend cuda"),
    ("16MiB", "16MB", 5, "reserve", "units: B, KiB, MiB, GiB, TiB"),
    ("16MiB", "-1", 5, "reserve", "not a size"),
    ("16MiB", "1.5", 5, "reserve", "not a size"),
    ("16MiB", "yes", 5, "reserve", "not a size"),
    ("16MiB", "99999999GiB", 5, "reserve", "more than any device has"),
    ("16MiB", "9" * 400 + "GiB", 5, "reserve", "more than any device has"),
    ("16MiB", "010", 5, "reserve", "read by YAML as 8"),
    ("  stop: 5s", "  stop: 5", 11, "timeouts.stop", "write 5s"),
    ("  stop: 5s", "  stop: 0s", 11, "timeouts.stop", "above zero"),
    ("  stop: 5s", "  stop: 99999h", 11, "timeouts.stop", "at most 30 days"),
    ("  stop: 5s", "  stop: {a: b}", 11, "timeouts.stop", "not a duration"),
    ("  stop: 5s", "  stop: 1:30", 11, "timeouts.stop", "has no unit"),
    ("  stop: 5s", "  heartbeat: 1ms", 11, "timeouts.heartbeat", "too short to be kept; give at least 1s"),
    ("timeouts:", "restarts: {backoff: 2m}\ntimeouts:", 6, "restarts.backoff", "backoff 2m is above backoff_max 60s"),
    ("phase: 60s", "phase: 120s", 7, "timeouts.phase", "phase 120s is not below stage 120s"),
    ("boot: 180s", "boot: 2m", 8, "timeouts.stage", "stage 120s is not below boot 2m"),
    ("lock: 60s", "lock: 500s", 10, "timeouts.lock", "lock 500s is not below stage 120s"),
    ("  phase: 60s\n", "", 7, "timeouts.stage", "phase 300s (default) is not below stage 120s"),
    ("    devices: [0]", "    devices: []", 20, "stages[0].devices", "is empty"),
    ("    devices: [0]", "    devices: 0", 20, "stages[0].devices", "0 is not a list like [0, 1]"),
    ("    devices: [0]", "    devices:\n      - 0\n      - -1", 22, "stages[0].devices[1]", "at least 0"),
    ("    devices: [0]", "    devices: [yes]", 20, "stages[0].devices[0]", "yes is not a device number or a UUID"),
    ("    devices: [0]", '    devices: ["0"]', 20, "stages[0].devices[0]", "without quotes"),
    ("    devices: [0]", "    devices: [8932f937]", 20, "stages[0].devices[0]", "'8932f937' is not a device: give a"),
    ("    devices: [0]", "    devices: [cuda:0]", 20, "stages[0].devices[0]", "'cuda:0' is not a device"),
    ("    devices: [0]", "    devices: [GPU-]", 20, "stages[0].devices[0]", "'GPU-' is not a device"),
    ("    devices: [0]", "    devices: [GPU-8932_937]", 20, "stages[0].devices[0]", "is not a device"),
    ("    devices: [0]", "    devices: [1.5]", 20, "stages[0].devices[0]", "1.5 is not a device number or a UUID"),
    ("    devices: [0]", "    devices: [null]", 20, "stages[0].devices[0]", "is empty; give a device number"),
    ("    devices: [0]", "    devices: [0, GPU-8932f937]", 20, "stages[0].devices[1]", "no device of backend"),
    ("    devices: [0]", "    devices: [SIM-0a, SIM-0A]", 20, "stages[0].devices", "lists device SIM-0a twice"),
    ("    devices: [0]", "    devices: [1, 0, 1]", 20, "stages[0].devices", "lists device 1 twice"),
    ("  - id: 1", "  - id: 0", 27, "stages[1].id", "0 is taken by stages[0]"),
    ("  - id: 1", "  - id: 1.0", 27, "stages[1].id", "1.0 is not a whole number"),
    ("  - id: 1", "  - id: 01", 27, "stages[1].id", "01 is read by YAML as 1"),
    ("    name: talker", "    name: thinker", 28, "stages[1].name", "'thinker' is taken by stages[0]"),
    (
        "    component: talker",
        "    component: taker",
        29,
        "stages[1].component",
        "not one of thinker, talker, code2wav",
    ),
    (
        "    component: talker",
        "    engine: vllm\n    component: x",
        29,
        "stages[1].engine",
        "neither 'qwen3-omni' nor a",
    ),
    ("utilization: 0.9", "utilization: 0", 21, "stages[0].utilization", "above 0"),
    ("utilization: 0.9", "utilization: 1.01", 21, "stages[0].utilization", "at most 1"),
    ("utilization: 0.9", "utilization: .nan", 21, "stages[0].utilization", "not a finite number"),
    ("utilization: 0.9", "utilization: 90%", 21, "stages[0].utilization", "90% is a text; give a number"),
    ("utilization: 0.9", "utilization: 0.9\n    budget: 1GiB", 22, "stages[0].budget", "both given; keep one"),
    ("    utilization: 0.9\n", "", 17, "stages[0].utilization", "give a utilization like 0.9, a budget like 20GiB"),
    ("budget: 512MiB", "budget: Auto", 31, "stages[1].budget", "'Auto' is not a"),
    (
        "utilization: 0.9",
        "utilization: 0.9\n    kv_weight: 2",
        22,
        "stages[0].kv_weight",
        "goes with budget: auto only",
    ),
    ("utilization: 0.9", "budget: auto\n    kv_weight: 0", 22, "stages[0].kv_weight", "above 0"),
    ("budget: 512MiB", "budget: auto", 31, "stages[1].budget", "worked out for a stage on one device"),
    ("budget: 512MiB", "budget: 0", 31, "stages[1].budget", "not above zero"),
    ("max_num_seqs: 6", "max_num_seqs: 0", 22, "stages[0].max_num_seqs", "at least 1"),
    ("max_model_len: 256", "max_model_len: 9999999999", 24, "stages[0].max_model_len", "at most 2147483647"),
    ("max_num_seqs: 6", "max_num_seqs: " + "9" * 5000, 22, "stages[0].max_num_seqs", "not a value of type int"),
    ("max_num_seqs: 6", "max_num_seqs: 300", 23, "stages[0].max_num_batched_tokens", "256 is below max_num_seqs 300"),
    ("    max_num_seqs: 6\n", "", 17, "stages[0].max_num_seqs", "is missing"),
    ("graphs: off", "graphs: on", 35, "stages[1].graphs", "leave it out for all"),
    ("graphs: off", "graphs: []", 35, "stages[1].graphs", "neither 'off' nor a list"),
    ("graphs: off", "graphs: [1, 0]", 35, "stages[1].graphs", "0 is not a batch size"),
    ("graphs: off", "graphs: [2, 2]", 35, "stages[1].graphs", "lists batch size 2 twice"),
    ("graphs: off", "graphs: [1, 8]", 35, "stages[1].graphs[1]", "8 is above max_num_seqs 4"),
    ("float32", "fp32", 25, "stages[0].dtype", "not one of 'auto', 'float32'"),
    ("float32", "float23", 25, "stages[0].dtype", "did you mean 'float32'?"),
    ('{OMP_NUM_THREADS: "1"}', "{OMP_NUM_THREADS: 1}", 26, "stages[0].env.OMP_NUM_THREADS", 'quote it: "1"'),
    ('{OMP_NUM_THREADS: "1"}', "{FLAG: on}", 26, "stages[0].env.FLAG", "on is read by YAML as true/false"),
    ('{OMP_NUM_THREADS: "1"}', '{A: "\\uD800"}', 26, "stages[0].env.A", "cannot be passed to a process"),
    ('{OMP_NUM_THREADS: "1"}', '{"A=B": "1"}', 26, "stages[0].env.A=B", "not a name of an environment variable"),
    ('{OMP_NUM_THREADS: "1"}', '{CUDA_VISIBLE_DEVICES: "0"}', 26, "stages[0].env.CUDA_VISIBLE_DEVICES", "itself"),
    ('{OMP_NUM_THREADS: "1"}', '{CUDA_DEVICE_ORDER: "x"}', 26, "stages[0].env.CUDA_DEVICE_ORDER", "itself"),
    ('{OMP_NUM_THREADS: "1"}', '{NOTIFY_SOCKET: "x"}', 26, "stages[0].env.NOTIFY_SOCKET", "itself"),
    (
        'env: {OMP_NUM_THREADS: "1"}',
        "weights: {backend: buffer}",
        26,
        "stages[0].weights.backend",
        "did you mean 'b",
    ),
    ('env: {OMP_NUM_THREADS: "1"}', "weights: {thread: 2}", 26, "stages[0].weights.thread", "did you mean 'threads'?"),
    ('env: {OMP_NUM_THREADS: "1"}', "weights: {threads: 65}", 26, "stages[0].weights.threads", "must be at most 64"),
    ('env: {OMP_NUM_THREADS: "1"}', "weights: direct", 26, "stages[0].weights", "is not a section"),
    ("order: overlap", "prefetch: 1", 4, "prefetch", "1 is not true or false"),
    ('{OMP_NUM_THREADS: "1"}', '[A, "1"]', 26, "stages[0].env", "is not a section"),
    ("name: demo", "name: !!python/object:os.system x", 1, "name", "tag '!!python/object:os.system' is not supported"),
    ("name: demo", "name: &a [*a]", 1, "name[0]", "refers to itself"),
    ("order: overlap", "? [a, b]\n: x", 4, "?", "cannot be a key"),
    ("name: demo", "<<: 3\nname: demo", 1, "<<", "only a section can be merged"),
    ("  phase: 60s", "\tphase: 60s", 7, None, "a tab; YAML wants spaces here"),
    ("name: demo", "name: [demo", 2, None, "is not YAML"),
    ("name: demo", "name: *nobody", 1, None, "undefined alias"),
    ("name: demo", 'name: "\\UFFFFFFFF"', None, None, "is not YAML"),
    ("name: demo", "name: demo\n---\na: b", 2, None, "a second document"),
    ("name: demo", "name: de\x07mo", 1, None, "is not allowed"),
    ("name: demo", "name: " + "[" * 40 + "]" * 40, 1, None, "nested deeper than"),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "text"), BAD, ids=[f"{key}-{new[:24]!r}" for _, new, _, key, _ in BAD]
)
def test_one_fault_is_reported_with_its_line_and_key(
    tmp_path: Path, old: str, new: str, line: int | None, key: str | None, text: str
) -> None:
    assert GOOD.count(old) >= 1
    found = faults(tmp_path, GOOD.replace(old, new, 1))
    assert [(place, name) for place, name, _ in found] == [(line, key)], found
    assert text in found[0][2]
    assert len(found[0][2]) < 400


@pytest.mark.parametrize(
    ("body", "line", "text"),
    [
        ("", None, "is empty"),
        ("# nothing\n", None, "is empty"),
        ("null\n", None, "is empty"),
        ("- a\n- b\n", 1, "is not a list of 'key: value' lines"),
        ("just text\n", 1, "is not a list of 'key: value' lines"),
        (b"name: demo\nmodel: \xff\n", 2, "byte 0xff is not UTF-8"),
        (b"a" * (MAX_FILE_BYTES + 1), None, "larger than 1 MiB"),
        ("x: [" + "1," * 21_000 + "]\n", 1, "has more than 20000 values"),
    ],
)
def test_a_file_that_is_no_deployment_at_all(tmp_path: Path, body: str | bytes, line: int | None, text: str) -> None:
    ((found_line, key, found_text),) = faults(tmp_path, body)
    assert (found_line, key) == (line, None)
    assert text in found_text


@pytest.mark.timeout(10)
def test_an_alias_bomb_is_refused_before_it_expands(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    ((_, _, text),) = faults(tmp_path, "\n".join(lines))
    assert "expands to more than 20000 values" in text


@pytest.mark.timeout(10)
def test_a_merge_bomb_is_refused_before_it_expands(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}], k{n}: 1}}" for n in range(1, 12)]
    assert "expands to more than 20000 values" in faults(tmp_path, "\n".join(lines))[0][2]


@pytest.mark.parametrize(
    ("name", "text"), [("absent.yaml", "no such file"), ("", "is a directory"), ("a\0b", "cannot be")]
)
def test_a_path_that_cannot_be_read(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load_deployment(f"{tmp_path}/{name}")
    assert len(caught.value.faults) == 1


def test_every_fault_of_a_file_comes_at_once(tmp_path: Path) -> None:
    body = (
        GOOD.replace("order: overlap", "oder: overlap")
        .replace("16MiB", "16MB")
        .replace("phase: 60s", "phase: 120s")
        .replace("name: talker", "name: thinker")
        .replace("component: talker", "component: taker")
        .replace("utilization: 0.9", "utilization: 2\n    budget: 1GiB")
        .replace('"1"', "1")
    )
    assert [(line, key) for line, key, _ in faults(tmp_path, body)] == [
        (4, "oder"),
        (5, "reserve"),
        (7, "timeouts.phase"),
        (21, "stages[0].utilization"),
        (22, "stages[0].budget"),
        (27, "stages[0].env.OMP_NUM_THREADS"),
        (29, "stages[1].name"),
        (30, "stages[1].component"),
    ]


def test_of_thousands_of_graphs_that_are_too_large_a_few_are_named(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(GOOD.replace("graphs: off", f"graphs: {list(range(1, 10_001))}"))
    with pytest.raises(ConfigError) as caught:
        load_deployment(path)
    assert [fault.key for fault in caught.value.faults][-2:] == ["stages[1].graphs[8]", "stages[1].graphs"]
    assert "has 9,991 more sizes above max_num_seqs 4; take them out as well" in caught.value.faults[-1].text


def test_no_simulated_section_for_the_simulated_backend(tmp_path: Path) -> None:
    section = "simulated:\n  devices: {0: 1GiB, 1: 1GiB}\n  context: 64MiB\n  transfer_rate: 2GiB/s\n"
    ((line, key, text),) = faults(tmp_path, GOOD.replace(section, ""))
    assert (line, key) == (1, "simulated")
    assert "backend simulated needs a section" in text


def test_a_key_of_another_engine_may_have_any_component(tmp_path: Path) -> None:
    stage = load(
        tmp_path, GOOD.replace("    component: talker", "    component: x\n    engine: my.mod:Cls")
    ).deployment.stages[1]
    assert (stage.component, stage.engine) == ("x", "my.mod:Cls")


def test_devices_by_uuid(tmp_path: Path) -> None:
    section = "simulated:\n  devices: {0: 1GiB, 1: 1GiB}\n  context: 64MiB\n  transfer_rate: 2GiB/s\n"
    body = GOOD.replace("backend: simulated", "backend: cuda").replace(section, "")
    deployment = load(tmp_path, body.replace("[0, 1]", "[1, GPU-8932F937, MIG-7f0b]")).deployment
    assert deployment.stage_refs == {0: (0,), 1: (1, "GPU-8932f937", "MIG-7f0b")}
    assert Deployment.model_validate(to_raw(deployment)) == deployment
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(json.dumps(to_raw(deployment))))
    ((line, key, text),) = faults(tmp_path, body.replace("[0, 1]", "[0, SIM-0]"))
    assert (line, key, text) == (26, "stages[1].devices[1]", "'SIM-0' is no device of backend cuda; name one")


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    common = "max_num_seqs: 4\n    max_num_batched_tokens: 256\n    max_model_len: 256"
    body = GOOD.replace("  - id: 0", "  - &first\n    id: 0").replace(
        f"    {common}\n    graphs: off\n", "    <<: *first\n"
    )
    first, second = load(tmp_path, body.replace("    budget: 512MiB\n", "")).deployment.stages
    assert (second.id, second.name, second.devices) == (1, "talker", (0, 1))
    assert (second.max_num_seqs, second.utilization, second.env) == (6, 0.9, first.env)


def test_a_fault_in_a_merged_value_points_at_the_anchor(tmp_path: Path) -> None:
    body = GOOD.replace("  - id: 0", "  - &first\n    id: 0").replace("dtype: float32", "dtype: fp32")
    assert [(line, key) for line, key, _ in faults(tmp_path, body.replace("    graphs: off", "    <<: *first"))] == [
        (26, "stages[0].dtype"),
        (26, "stages[1].dtype"),
        (32, "stages[1].budget"),
    ]


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_is_accepted(tmp_path: Path, indent: Any) -> None:
    body = json.dumps(to_raw(load(tmp_path, GOOD).deployment), indent=indent)
    assert load(tmp_path, body, "demo.json").deployment == load(tmp_path, GOOD).deployment


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf" + GOOD.encode()).deployment.name == "demo"


def test_paths_are_relative_to_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "demo.yaml").write_text(GOOD.replace("order: overlap", "lock_dir: locks\nruntime_dir: /run/x"))
    monkeypatch.chdir(tmp_path)
    loaded = load_deployment("sub/demo.yaml")
    assert loaded.path == tmp_path / "sub" / "demo.yaml"
    assert loaded.model_dir == tmp_path / "model"
    assert loaded.lock_dir == tmp_path / "sub" / "locks"
    assert loaded.runtime_dir == Path("/run/x")
    machine = loaded.machine(tmp_path / "default")
    assert machine is not None
    assert (machine.path, machine.context_bytes) == (tmp_path / "default", 64 * MIB)


def test_models_built_in_python_follow_the_same_rules(tmp_path: Path) -> None:
    deployment = load(tmp_path, GOOD).deployment
    assert Deployment.model_validate(to_raw(deployment)) == deployment
    assert Deployment.model_validate_json(deployment.model_dump_json(by_alias=True)) == deployment
    with pytest.raises(ValidationError, match="phase 700s is not below stage"):
        Timeouts.model_validate({"phase": "700s"})
    with pytest.raises(ValidationError, match="taken by stages"):
        Deployment.model_validate({**to_raw(deployment), "stages": [to_raw(deployment.stages[0])] * 2})
    with pytest.raises(ValidationError, match="frozen"):
        deployment.name = "other"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_good_and_point_to_the_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=../docs/stagelaunch.schema.json"
    load_deployment(path)
    # As an editor sees it: keys as text, as JSON has them.
    instance = json.loads(json.dumps(yaml.safe_load(path.read_text())))
    jsonschema.Draft202012Validator(json_schema()).validate(instance)


def test_the_shipped_configs() -> None:
    assert [path.stem for path in CONFIGS] == [
        "own-engine",
        "qwen3-omni-1x141gb",
        "qwen3-omni-2xh100",
        "qwen3-omni-tiny",
    ]


def test_the_schema_describes_every_key_and_refuses_others() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert "$id" not in schema
    sections = [schema, *schema["$defs"].values()]
    assert len(sections) == 7
    for section in sections:
        assert section["additionalProperties"] is False
        assert section["description"]
        for name, body in section["properties"].items():
            assert body.get("description"), name
    assert set(schema["properties"]) == set(key_names(Deployment))
    assert set(schema["$defs"]["Stage"]["properties"]) == set(key_names(Stage))


def test_the_committed_schema_is_the_current_one() -> None:
    committed = json.loads((ROOT / "docs" / "stagelaunch.schema.json").read_text())
    assert committed == json_schema(), "run: stagelaunch schema > docs/stagelaunch.schema.json"
