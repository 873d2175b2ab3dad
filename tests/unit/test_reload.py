"""A file that changed: what is taken over, what waits, and how each difference is said."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagelaunch.config_file import load_deployment
from stagelaunch.core.config import Deployment
from stagelaunch.core.reload import Reloaded, reload, take_over
from stagelaunch.supervisor.reload import reload_file

STAGE = {
    "id": 0, "name": "talker", "component": "talker", "devices": ["SIM-0000"], "utilization": 0.6, "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "max_model_len": 64,
}  # fmt: skip
BASE: dict[str, Any] = {
    "name": "site",
    "model": "model",
    "backend": "simulated",
    "simulated": {"devices": {0: "1GiB"}},
    "stages": [STAGE, {**STAGE, "id": 1, "name": "thinker", "component": "thinker"}],
}


def read(**changes: Any) -> Deployment:
    return Deployment.model_validate({**deepcopy(BASE), **changes})


def with_talker(**changes: Any) -> Deployment:
    return read(stages=[{**STAGE, **changes}, BASE["stages"][1]])


def lines(old: Deployment, new: Deployment) -> list[str]:
    return list(reload(old, new).lines)


@pytest.mark.parametrize(
    ("new", "line"),
    [
        (read(timeouts={"stop": "20s"}), "timeouts.stop: 15s -> 20s"),
        (read(timeouts={"heartbeat": "1.5m"}), "timeouts.heartbeat: 30s -> 90s"),
        (read(on_failure="restart-stage"), "on_failure: stop-all -> restart-stage"),
        (read(restarts={"max": 5}), "restarts.max: 3 -> 5"),
        (read(memory_tolerance="1000B"), "memory_tolerance: 64MiB -> 1000B"),
        (read(logs={"max_size": "1GiB"}), "logs.max_size: 64MiB -> 1GiB"),
        (read(order="serial"), "order: overlap -> serial (takes effect at the next `up`)"),
        (read(reserve="512MiB"), "reserve: 2GiB -> 512MiB (takes effect at the next `up`)"),
        (
            read(simulated={"devices": {0: "2GiB"}}),
            "simulated.devices.0: 1GiB -> 2GiB (takes effect at the next `up`)",
        ),
        (
            with_talker(utilization=0.5),
            "stages.talker.utilization: 0.6 -> 0.5 (takes effect at the next `up`)",
        ),
        (
            with_talker(devices=["SIM-0000", 1]),
            'stages.talker.devices: ["SIM-0000"] -> ["SIM-0000", 1] (takes effect at the next `up`)',
        ),
        (
            with_talker(graphs=[1, 2]),
            "stages.talker.graphs: not set -> [1, 2] (takes effect at the next `up`)",
        ),
        (
            with_talker(options={"a": "x\ny" + 99 * "z"}),
            f'stages.talker.options.a: not set -> "x\\ny{72 * "z"}... (takes effect at the next `up`)',
        ),
        (
            with_talker(env={"HF_TOKEN": "secret"}),
            "stages.talker.env.HF_TOKEN: added (takes effect at the next `up`)",
        ),
        (read(stages=list(reversed(BASE["stages"]))), "nothing has changed"),
        (read(stages=BASE["stages"][1:]), "stages.talker: removed (takes effect at the next `up`)"),
    ],
)
def test_each_difference_is_one_line_in_the_words_of_the_file(new: Deployment, line: str) -> None:
    assert lines(read(), new) == [line]


def test_a_stage_is_known_by_its_name_and_a_secret_is_never_said() -> None:
    renamed = read(stages=[{**STAGE, "name": "speaker", "utilization": 0.1}, BASE["stages"][1]])
    assert lines(read(), renamed) == [
        "stages.talker: removed (takes effect at the next `up`)",
        "stages.speaker: added (takes effect at the next `up`)",
    ]
    old, new = with_talker(env={"A": "secret", "B": "secret"}), with_talker(env={"A": "other"})
    assert [line.partition(" (")[0] for line in lines(old, new)] == [
        "stages.talker.env.A: changed",
        "stages.talker.env.B: removed",
    ]


def test_the_running_one_keeps_its_resolved_devices() -> None:
    resolved = read().on_devices({"SIM-0000": 0})
    merged = take_over(resolved, read(timeouts={"stop": "1s"}, order="serial"))
    assert (merged.timeouts.stop_s, merged.order, merged.device_indices) == (1.0, "overlap", (0,))


def test_a_file_that_is_wrong_now_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump({**BASE, "on_failure": "restart-all"}))
    running = load_deployment(path).deployment
    path.write_text(yaml.safe_dump({**BASE, "on_failur": "stop-all", "order": "wrong"}))
    found = reload_file(path, running)
    assert found.deployment is running
    first, *faults = found.lines
    assert first == f"cannot reload {path}: it is wrong, and nothing was changed; correct it:"
    assert ["on_failur" in fault or "order" in fault for fault in faults] == [True, True]
    path.unlink()
    assert "no such file" in reload_file(path, running).lines[1]
    path.write_text(yaml.safe_dump(BASE))
    assert reload_file(path, running) == Reloaded(read(), ("on_failure: restart-all -> stop-all",))
