"""The whole product with a light engine: boot, answer, stop, and nothing is left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployments import Ran, Site, in_full_only, light_stage

from stagelaunch.core.phases import BOOT_PHASES


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def wait_for(process: subprocess.Popen[str], text: str) -> list[str]:
    """The lines of stderr up to the first that contains ``text``."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"never said {text!r}: {''.join(lines)}")


def finish(process: subprocess.Popen[str], lines: list[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=60)
    return process.returncode, "".join(lines) + stderr


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three stages that are ready, for tests that only look; taken down and looked over at the end."""
    site = Site(tmp_path_factory.mktemp("ready"))
    up = site.run("up", str(site.write()), "--detach", "--wait")
    assert up.code == 0, up.stderr
    assert "site: ready" in up.stdout
    yield site
    down = site.run("down", str(site.config))
    assert (down.code, "device memory is back" in down.stdout) == (0, True)
    site.assert_nothing_left(up)
    assert site.state()["state"] == "ended"
    assert site.run("down", str(site.config)).code == 1
    assert "ended with exit code 0" in site.run("status", str(site.config)).stdout
    assert "site: booted in" in site.run("report", str(site.config)).stdout


def status(site: Site) -> dict[str, Any]:
    ran = site.run("status", str(site.config), "--json")
    body: dict[str, Any] = json.loads(ran.stdout)
    assert ran.code == (0 if body["state"] == "ready" else 1)
    return body


def test_every_stage_is_ready_and_tells_its_phases_and_its_ledger(ready: Site) -> None:
    body = status(ready)
    assert body["state"] == "ready"
    for stage in body["stages"]:
        assert stage["phase"] == "ready"
        assert stage["ledger_is_final"]
        assert stage["ledger"]["num_blocks"] > 0
        assert [span["phase"] for span in stage["phases"]] == [str(phase) for phase in BOOT_PHASES]


def test_what_the_device_records_is_what_the_ledger_says(ready: Site) -> None:
    held = {process.pid: process.size_bytes for info in ready.devices().values() for process in info.processes}
    for stage in status(ready)["stages"]:
        terms = {name: term["bytes"] for name, term in stage["ledger"]["terms"].items()}
        resident = terms["context"] + terms["weights"] + terms["non_torch"] + terms["graphs"] + terms["kv"]
        # Weights and KV in segments of 2 MiB, each by itself and both together: rounding may differ by one.
        assert abs(held[stage["pid"]] - resident) <= 2 << 20
        assert held[stage["pid"]] <= terms["budget"]


def test_probes_go_through_the_graphs(ready: Site) -> None:
    probe = ready.run("probe", str(ready.config))
    assert (probe.code, probe.stdout.count("identical")) == (0, 3)
    one = json.loads(ready.run("probe", str(ready.config), "beta", "--json").stdout)
    assert [(result["stage"], result["through_graph"]) for result in one] == [("beta", True)]
    nobody = ready.run("probe", str(ready.config), "delta")
    assert (nobody.code, "delta" in nobody.stderr) == (1, True)


def test_the_report_and_the_trace_say_what_the_events_said(ready: Site, tmp_path: Path) -> None:
    lines = ready.run("events", str(ready.config), "--no-follow").stdout.splitlines()
    events = [json.loads(line) for line in lines]
    ran = ready.run("report", str(ready.config), "--json", str(tmp_path / "report"), "--trace", str(tmp_path / "trace"))
    report, trace = (json.loads((tmp_path / name).read_text()) for name in ("report", "trace"))
    boot = next(event for event in events if event["event"] == "ready" and "stage" not in event)
    assert ran.code == 0, ran.stderr
    assert f"site: booted in {report['boot_s']:.2f}s, overlap order" in ran.stdout
    assert report["boot_s"] == pytest.approx(boot["boot_s"], abs=0.1)
    assert 0 < report["floor_s"] <= report["boot_s"]
    assert sum(link["took_s"] for link in report["critical_path"]) == pytest.approx(report["boot_s"])
    for stage in report["stages"]:
        own = [event for event in events if event.get("stage") == stage["stage"]]
        assert [phase["phase"] for phase in stage["phases"]] == [str(phase) for phase in BOOT_PHASES]
        said = [(event["took_s"], event["waited_s"]) for event in own if event["event"] in ("phase", "ready")]
        for phase, (took_s, waited_s) in zip(stage["phases"], said, strict=True):
            assert (phase["took_s"], phase["waited_s"]) == pytest.approx((took_s, waited_s), abs=0.05)
        waits = {(event["phase"], *event["holders"]) for event in own if event["event"] == "lock_wait"}
        told = {(phase["phase"], *wait["holders"]) for phase in stage["phases"] for wait in phase["waits"]}
        assert told <= waits
        slices = {each["name"]: each["dur"] for each in trace["traceEvents"]
                  if each["ph"] == "X" and each["cat"] == "phase" and each["tid"] == stage["stage_id"] + 1}  # fmt: skip
        assert slices == pytest.approx({p["phase"]: 1e6 * p["took_s"] for p in stage["phases"]}, abs=5e4)
        assert stage["phases"][3]["bytes"] == (8 << 20) + 4 * 256 * 256


def test_a_second_start_is_refused_and_names_the_first(ready: Site) -> None:
    second = ready.up()
    assert second.code == 75
    assert f"supervisor pid {status(ready)['pid']}" in second.stderr


def test_the_supervisor_never_imports_torch(ready: Site) -> None:
    maps = Path(f"/proc/{status(ready)['pid']}/maps").read_text()
    assert "python" in maps
    assert "libtorch" not in maps


@in_full_only
def test_blocks_are_the_same_in_both_orders(site: Site) -> None:
    found = []
    for order in ("overlap", "serial"):
        site.top["order"] = order
        config = str(site.write())
        assert site.run("up", config, "--detach", "--wait").code == 0
        status = json.loads(site.run("status", config, "--json").stdout)
        found.append({stage["name"]: stage["ledger"]["num_blocks"] for stage in status["stages"]})
        assert site.run("down", config).code == 0
    assert found[0] == found[1]


def test_serial_order_starts_a_stage_only_when_the_one_before_is_ready(site: Site) -> None:
    site.top["order"] = "serial"
    process = site.start("up", str(site.write()))
    lines = wait_for(process, "gamma (pid")
    assert any("beta" in line and "-> ready" in line for line in lines)
    process.send_signal(signal.SIGINT)
    code, said = finish(process, lines)
    assert code == 130, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ready_stops_in_good_order(site: Site, number: signal.Signals) -> None:
    site.stages = site.stages[1:]
    process = site.start("up", str(site.write()))
    assert process.stdout is not None
    assert "site: ready" in process.stdout.readline()
    process.send_signal(number)
    code, said = finish(process, [])
    assert code == (130 if number is signal.SIGINT else 0), said
    assert said.count("ended (exit code 0)") == 2


def test_ctrl_c_while_booting_leaves_nothing(site: Site) -> None:
    fifo = site.directory / "hold"
    os.mkfifo(fifo)
    site.stages[1]["options"] = {"hold": str(fifo)}
    process = site.start("up", str(site.write()))
    lines = wait_for(process, "gamma (pid")
    # beta holds its load phase until a byte comes: opening the FIFO returns when it is there.
    with fifo.open("wb", buffering=0):
        process.send_signal(signal.SIGINT)
        code, said = finish(process, lines)
    assert code == 130
    site.assert_nothing_left(Ran(code, "", said))


def test_a_stage_that_dies_after_boot_takes_the_others_along(site: Site) -> None:
    site.stages = site.stages[:2]
    process = site.start("up", str(site.write()))
    assert process.stdout is not None
    assert "site: ready" in process.stdout.readline()
    pid = next(s["pid"] for s in json.loads(site.run("status", str(site.config), "--json").stdout)["stages"])
    os.kill(pid, signal.SIGKILL)
    code, said = finish(process, [])
    assert code == 1
    assert "stage alpha failed in phase ready" in said
    assert "SIGKILL" in said
    site.assert_nothing_left(Ran(code, "", said))


def test_a_killed_supervisor_takes_a_stage_along_that_hangs(site: Site) -> None:
    site.stages = [light_stage(1, "beta", 1, options={"fault": "load:hang"})]
    process = site.start("up", str(site.write()))
    lines = wait_for(process, "context -> load")
    (pid,) = Ran(0, "", "".join(lines)).pids
    stage = os.pidfd_open(pid)
    process.kill()
    finish(process, lines)
    gone, _, _ = select.select([stage], [], [], 10)
    os.close(stage)
    assert gone == [stage]
    status = site.run("status", str(site.config))
    assert (status.code, "died without cleaning up" in status.stdout) == (1, True)

    # What the dead supervisor left behind is in nobody's way.
    site.stages = [light_stage(1, "beta", 1)]
    again = site.run("up", str(site.write()), "--detach", "--wait")
    assert again.code == 0, again.stderr
    assert site.run("down", str(site.config)).code == 0
    site.assert_nothing_left(again)


@pytest.mark.parametrize(("second", "killed"), [((), False), (("--now",), True)])
def test_asking_twice_is_asking_and_only_now_means_now(site: Site, second: tuple[str, ...], killed: bool) -> None:
    # Asked, it hangs; at four fifths of the grace it gets TERM, which ends it. Nobody waits for the rest.
    site.stages = [light_stage(1, "beta", 1, options={"fault": "stop:hang"})]
    process = site.start("up", str(site.write()))
    assert process.stdout is not None
    assert "site: ready" in process.stdout.readline()
    first = site.start("down", str(site.config))
    lines = wait_for(process, "stopping: ")
    again = site.run("down", str(site.config), *second)
    code, said = finish(process, lines)
    first.communicate(timeout=30)
    assert (code, first.returncode, again.code) == (0, 0, 0), said
    assert ("killing it" in said) is killed
