"""What a stage is charged with: whose memory is whose, what happens when nobody can tell, and when it was too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deployments import Ran, Site, in_full_only, light_stage

from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.ledger import Source
from stagelaunch.core.units import MIB
from stagelaunch.devices.simfile import SimulatedFile

CONTEXT_BYTES = 40 * MIB
TOTALS = {0: 1 << 30, 1: 1 << 30}
ACCOUNT = """
import json, os, sys
from pathlib import Path
from stagelaunch.core.errors import StagelaunchError
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices import inventory
from stagelaunch.devices.simulated import SimulatedDevice
from stagelaunch.worker.own_memory import OwnMemory
import torch

class DriverDevice(SimulatedDevice):
    # What a CUDA device does: the table and the free bytes are the driver's.
    def process_table(self):
        return inventory.process_table(self.uuid)
    def driver_free_bytes(self):
        return inventory.free_cuda_bytes(self.uuid)

machine = SimulatedMachine(Path(sys.argv[1]), {0: 1 << 30, 1: 1 << 30}, int(sys.argv[2]))
device = DriverDevice(machine, 0)
memory = OwnMemory(device, [os.getpid() if pid == 'self' else int(pid) for pid in sys.argv[3].split(',')])
try:
    context = memory.create_context()
    tensor = device.empty((10 << 20,), torch.uint8)
    memory.begin_window()
    device._file.allocate(0, 3 << 20)
    non_torch = memory.non_torch()
    held = memory.held_bytes()
    print(json.dumps([context.size_bytes, context.source, non_torch.size_bytes, non_torch.source, held]))
except StagelaunchError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, [light_stage(0, "alpha", 0)])


@pytest.fixture
def account(fake_nvml, tmp_path, monkeypatch, spawn):
    """Ask a process for its own account, through the real pynvml."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml))
    monkeypatch.setenv("FAKE_NVML_FILE", str(tmp_path / "devices"))

    def ask(fault: str = "", own_pids: str = "self", context_bytes: int = CONTEXT_BYTES) -> list[Any]:
        SimulatedFile.open(SimulatedMachine(tmp_path / "devices", TOTALS, context_bytes)).close()
        monkeypatch.setenv("FAKE_NVML_FAULT", fault)
        child = spawn(ACCOUNT, tmp_path / "devices", context_bytes, own_pids)
        answer: list[Any] = json.loads(child.stdout.readline())
        return answer

    return ask


@pytest.mark.parametrize(
    # A pid of ours that the driver does not know is what a container looks like from inside.
    ("own_pids", "source"),
    [("self", Source.OWN_PID), ("4000001,self", Source.HOST_PID), ("4000001", Source.NEW_PID)],
)
def test_each_rung_gives_the_same_figures(account, own_pids, source):
    held_bytes = CONTEXT_BYTES + 10 * MIB + 3 * MIB
    assert account(own_pids=own_pids) == [CONTEXT_BYTES, source, 3 * MIB, source, held_bytes]


@pytest.mark.parametrize("fault", ["sizes_zero", "sizes_unknown", "processes_hidden", "processes_raise"])
def test_a_driver_that_does_not_say_leaves_the_changes_of_free_memory(account, fault):
    assert account(fault) == [CONTEXT_BYTES, Source.FREE_DELTA, 3 * MIB, Source.FREE_DELTA, None]


def test_a_mig_device_is_asked_for_its_own_processes(account, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_MIG", "1:0")
    assert account()[:4] == [CONTEXT_BYTES, Source.OWN_PID, 3 * MIB, Source.OWN_PID]


def test_a_context_that_shows_nowhere_is_refused_and_not_taken_for_free(account):
    name, text = account("processes_hidden", context_bytes=0)
    assert name == "DisturbedError"
    assert "free memory did not fall" in text


def test_with_a_figure_a_free_context_is_no_unknown(account):
    assert account(context_bytes=0)[:2] == [0, Source.OWN_PID]


def test_no_figure_and_no_free_memory_is_refused(account):
    name, text = account("driver_not_loaded")
    assert name == "StageError"
    assert "neither this process's memory nor the device's free memory" in text


def ledger_of(site: Site, ran: Ran, foreign_bytes: int) -> dict[str, Any]:
    assert ran.code == 0, ran.stderr
    body = json.loads(site.run("status", str(site.config), "--json").stdout)
    assert site.run("down", str(site.config)).code == 0
    site.assert_nothing_left(ran, {0: foreign_bytes})
    found: dict[str, Any] = body["stages"][0]["ledger"]
    return found


def boot(site: Site, foreign_bytes: int = 0) -> tuple[dict[str, Any], str]:
    """The ledger of the one stage, and what was said; strangers hold ``foreign_bytes`` of its device at the end."""
    ran = site.up("--detach", "--wait")
    return ledger_of(site, ran, foreign_bytes), ran.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The ledger of the stage when nothing is in its way."""
    return boot(Site(tmp_path_factory.mktemp("plain"), [light_stage(0, "alpha", 0)]))[0]


def test_the_ledger_equals_what_the_device_recorded(plain: dict[str, Any]) -> None:
    ledger, terms = plain, plain["terms"]
    kept = sum(terms[name]["bytes"] for name in ("context", "weights", "non_torch", "graphs"))
    # The KV cache is whole blocks, the device gives whole segments: its other reading is what it made the device give.
    given = terms["kv"]["low_bytes"] + terms["kv"]["high_bytes"] - terms["kv"]["bytes"]
    assert ledger["held_bytes"] == kept + given
    assert abs(given - terms["kv"]["bytes"]) < 2 * MIB
    assert terms["context"] == {"bytes": 64 * MIB, "low_bytes": 64 * MIB, "high_bytes": 64 * MIB,
                                "source": Source.OWN_PID}  # fmt: skip
    assert terms["graphs"]["source"] == Source.MEASURED


def test_a_driver_that_tells_nothing_gives_the_same_kv_cache(site: Site, plain: dict[str, Any]) -> None:
    site.stages[0]["options"] = {"hidden": "yes"}
    untold, _ = boot(site)
    assert untold["terms"]["context"]["source"] == Source.FREE_DELTA
    assert (untold["num_blocks"], untold["held_bytes"]) == (plain["num_blocks"], None)


@pytest.fixture
def disturbed(site: Site, tmp_path: Path) -> Path:
    """A stage whose driver tells nothing, on a device where somebody else holds 300 MiB; the file of what they do."""
    site.write()
    machine = SimulatedMachine(tmp_path / "devices", {0: 1 << 30, 1: 1 << 30}, 64 * MIB)
    file = SimulatedFile.open(machine)
    file.set_foreign_bytes(0, 300 * MIB)
    file.close()
    intruder = tmp_path / "intruder"
    site.stages[0]["options"] = {"hidden": "yes", "intruder": str(intruder)}
    return intruder


@pytest.mark.parametrize("phase", [pytest.param("context", marks=in_full_only), "profile"])
def test_a_disturbed_measurement_is_repeated(site: Site, disturbed: Path, plain: dict[str, Any], phase: str) -> None:
    disturbed.write_text(f"{phase} {200 * MIB}\n")
    ledger, said = boot(site, 200 * MIB)
    assert "free memory rose by" in said
    assert said.count("is started once more in a fresh process") == 1
    assert ledger["num_blocks"] == plain["num_blocks"]


@in_full_only
def test_a_measurement_disturbed_again_is_refused_with_the_reason(site: Site, disturbed: Path) -> None:
    # Each profile runs the batch twice.
    disturbed.write_text("".join(f"profile {mib * MIB}\n" for mib in (250, 200, 150, 100)))
    ran = site.up()
    assert ran.code == 1
    assert ran.stderr.count("is started once more") == 1
    assert "stage alpha failed in phase profile" in ran.stderr
    assert "meanwhile free memory rose by 100.00 MiB, and the driver does not tell" in ran.stderr
    disturbed.write_text("")
    site.assert_nothing_left(ran, {0: 100 * MIB})


def test_graphs_that_take_more_than_expected_cost_one_restart_and_teach_the_next_boot(site: Site) -> None:
    site.stages[0]["options"] = {"surprise_mib": "200"}
    first, said = boot(site)
    assert said.count("is started once more in a fresh process, with") == 1
    assert "failed in capture: cannot keep the stage within its budget: " in said
    assert first["terms"]["graphs"]["bytes"] > first["graphs_estimate_bytes"] - first["terms"]["margin"]["bytes"]
    assert first["held_bytes"] <= first["terms"]["budget"]["bytes"]
    second, said = boot(site)
    assert "once more" not in said
    assert "less KV cache than estimated: an earlier boot found its graphs larger" in said
    assert second["num_blocks"] == first["num_blocks"]


@in_full_only
def test_a_stage_that_is_over_again_fails_with_the_figures_and_has_learnt(site: Site) -> None:
    # Budget and device leave the capture no room: how much it would have taken is not known the first time.
    site.stages[0] |= {"utilization": 0.95, "options": {"surprise_mib": "230"}}
    ran = site.up()
    assert ran.code == 1
    assert ran.stderr.count("is started once more") == 1
    assert "the device is out of memory" in ran.stderr
    assert "stage alpha failed in phase capture" in ran.stderr
    assert "more than it was given (budget 972.80 MiB" in ran.stderr
    site.assert_nothing_left(ran)
    ledger, said = boot(site)
    assert "once more" not in said
    assert ledger["held_bytes"] <= ledger["terms"]["budget"]["bytes"]


def test_a_stage_without_kv_cache_that_is_over_is_not_tried_again(site: Site) -> None:
    site.stages[0]["options"] = {"surprise_mib": "450", "no_kv": "yes"}
    ran = site.up()
    assert ran.code == 1
    assert "stage alpha failed in phase capture" in ran.stderr
    assert "more than it was given" in ran.stderr
    assert "once more" not in ran.stderr
    assert "less KV cache" not in ran.stderr


def test_too_small_a_budget_says_what_would_do_before_any_kv_is_allocated(site: Site) -> None:
    site.stages[0] |= {"budget": "240MiB"}
    del site.stages[0]["utilization"]
    site.stages[0] |= {"max_model_len": 100_000}
    ran = site.up()
    assert ran.code == 78
    assert "stage alpha failed in phase size" in ran.stderr
    advice = ran.stderr.partition("give it a budget of at least ")[2]
    longest = int(advice.partition("max_model_len of at most ")[2].split()[0])
    assert int(advice.split()[0]) > 240 * MIB
    site.stages[0] |= {"max_model_len": longest}
    assert boot(site)[0]["num_blocks"] == longest // 16 + 1
