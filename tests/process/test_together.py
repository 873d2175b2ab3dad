"""Several deployments on one machine, by the real command: what one has claimed the others leave alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from deployments import Ran, Site, in_full_only, light_stage

from stagelaunch.config_file import load_deployment
from stagelaunch.core.inventory import simulated_uuid
from stagelaunch.core.units import MIB
from stagelaunch.devices.simfile import SimulatedFile
from stagelaunch.system.claims import read_claims


def site_at(place: Path, name: str, utilization: float, **stage: Any) -> Site:
    """A deployment of one stage on device 0 of the machine at ``place``."""
    site = Site(place / name)
    site.directory.mkdir(exist_ok=True)
    machine = {"devices": {0: "1GiB", 1: "1GiB"}, "file": str(place / "devices")}
    site.top = {"name": name, "lock_dir": str(place / "locks"), "simulated": machine}
    # One that is held while others boot must not run into its own deadlines.
    site.top["timeouts"] = {
        "phase": "100s",
        "stage": "110s",
        "boot": "120s",
        "lock": "90s",
        "stop": "3s",
        "memory": "3s",
    }
    site.stages = [light_stage(0, "alpha", 0, utilization=utilization, **stage)]
    return site


class Waiting:
    """An ``up`` that is going on, with what it has said so far."""

    def __init__(self, site: Site, *options: str) -> None:
        self.site = site
        self.process = site.start("up", str(site.write()), *options)
        self.said = ""

    @property
    def supervisor(self) -> int:
        """As it has recorded itself; ``process`` is its warden."""
        name = self.site.top["name"]
        return int(json.loads((self.site.directory / "run" / name / "state.json").read_text())["pid"])

    def until(self, text: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if text in line:
                return line
        raise AssertionError(f"never said {text!r}: {self.said}")

    def end(self, number: signal.Signals | None = None) -> Ran:
        if number is not None:
            self.process.send_signal(number)
        stdout, stderr = self.process.communicate(timeout=60)
        self.said += stderr
        return Ran(self.process.returncode, stdout, self.said)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Waiting]:
    """A deployment that has claimed 0.6 of device 0 and holds next to nothing of it: it hangs in its load phase."""
    fifo = tmp_path / "hold"
    os.mkfifo(fifo)
    going = Waiting(site_at(tmp_path, "first", 0.6, options={"hold": str(fifo)}))
    with ExitStack() as stack:
        stack.callback(going.process.kill)
        going.until("context -> load")
        yield going


@contextmanager
def others_hold_half(place: Path) -> Iterator[None]:
    """Half of device 0 is in use by nobody known."""
    machine = load_deployment(site_at(place, "other", 0.1).write()).machine(place / "devices")
    assert machine is not None
    file = SimulatedFile.open(machine)
    file.set_foreign_bytes(0, 512 * MIB)
    try:
        yield
    finally:
        file.set_foreign_bytes(0, 0)
        file.close()


def claims_left(place: Path) -> list[str]:
    return [path.name for path in (place / "locks").iterdir() if ".claim." in path.name or ".member." in path.name]


def test_what_a_booting_deployment_has_claimed_is_refused_to_others(first: Waiting, tmp_path: Path) -> None:
    (claim,) = read_claims(tmp_path / "locks", simulated_uuid(0), str(tmp_path / "devices"))
    assert (claim.deployment, claim.pid) == ("first", first.supervisor)
    run = json.loads((first.site.directory / "run" / "first" / "run.json").read_text())
    assert [stage["claim_id"] for stage in run] == [claim.claim_id]

    second = site_at(tmp_path, "second", 0.6)
    plan = second.run("plan", str(second.write()), "--json")
    (now, _) = json.loads(plan.stdout)["devices"]
    assert now["free_bytes"] > 700 * MIB
    assert now["claims"][0] | {"held_bytes": None} == {
        "deployment": "first",
        "supervisor_pid": first.supervisor,
        "claimed_bytes": claim.claimed_bytes,
        "held_bytes": None,
    }
    refused = second.up()
    assert (plan.code, refused.code) == (2, 2)
    for text in (plan.stderr, refused.stderr):
        assert f"(deployment first (supervisor pid {first.supervisor}) claims 630.40 MiB and holds" in text
    state = json.loads((second.directory / "run" / "second" / "state.json").read_text())
    assert (state["state"], state["exit_code"]) == ("ended", 2)

    timed_out = second.up("--wait-for-memory", "100ms")
    assert timed_out.code == 75, timed_out.stderr
    assert "waiting for device memory for up to 0.10s" in timed_out.stderr
    assert "cannot admit deployment second: device memory did not become free within 0.10s" in timed_out.stderr
    assert timed_out.stderr.count("claims 630.40 MiB") == 2
    assert "ended with exit code 75" in second.run("status", str(second.config)).stdout

    # What fits beside the claim boots beside it.
    third = site_at(tmp_path, "third", 0.25)
    up = third.up("--detach", "--wait")
    assert up.code == 0, up.stderr
    assert len(read_claims(tmp_path / "locks", simulated_uuid(0), str(tmp_path / "devices"))) == 2
    assert third.run("down", str(third.config)).code == 0

    # It comes into its own when the first is gone.
    assert first.end(signal.SIGTERM).code == 130
    assert claims_left(tmp_path) == []
    up = second.up("--detach", "--wait")
    assert up.code == 0, up.stderr
    assert second.run("down", str(second.config)).code == 0
    assert claims_left(tmp_path) == []


@pytest.mark.parametrize("options", [(), pytest.param(("--detach", "--wait"), marks=in_full_only)])
def test_waiting_for_memory_ends_when_the_other_goes(first: Waiting, tmp_path: Path, options: tuple[str, ...]) -> None:
    second = Waiting(site_at(tmp_path, "second", 0.6), "--wait-for-memory", "60s", *options)
    assert "does not fit now: waiting for device memory for up to 1m00s" in second.until("waiting for")
    assert f"deployment first (supervisor pid {first.supervisor})" in second.until("claims")
    assert first.end(signal.SIGINT).code == 130
    second.until("alpha (pid")
    assert second.process.stdout is not None
    assert "second: ready" in second.process.stdout.readline()
    if options:
        assert second.end().code == 0
        assert second.site.run("down", str(second.site.config)).code == 0
    else:
        assert second.end(signal.SIGTERM).code == 0
    assert claims_left(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, ()),
        (signal.SIGTERM, ()),
        (signal.SIGINT, ("--detach",)),
        (signal.SIGTERM, ("--detach", "--wait")),
    ],
)
def test_a_signal_ends_the_wait_at_once_and_nothing_is_left(
    tmp_path: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    with others_hold_half(tmp_path):
        second = Waiting(site_at(tmp_path, "second", 0.6), "--wait-for-memory", "60s", *options)
        second.until("free now")
        ran = second.end(number)
    assert ran.code == 130, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "started" not in ran.stderr
    assert sorted(os.listdir(tmp_path / "locks")) == ["admission.lock"]
    state = json.loads((second.site.directory / "run" / "second" / "state.json").read_text())
    assert (state["state"], state["exit_code"]) == ("ended", 130)


def test_status_and_down_know_a_deployment_that_waits(tmp_path: Path) -> None:
    with others_hold_half(tmp_path):
        second = Waiting(site_at(tmp_path, "second", 0.6), "--wait-for-memory", "60s")
        second.until("free now")
        config = str(second.site.config)
        status = second.site.run("status", config)
        assert (status.code, f"waiting for device memory (supervisor pid {second.supervisor})" in status.stdout) == (
            1,
            True,
        )
        assert "free now" in status.stdout
        assert json.loads(second.site.run("status", config, "--json").stdout)["state"] == "waiting"
        probe = second.site.run("probe", config)
        assert (probe.code, "waits for device memory" in probe.stderr) == (1, True)
        again = second.site.up()
        assert (again.code, f"supervisor pid {second.supervisor}" in again.stderr) == (75, True)
        down = second.site.run("down", config)
        assert down.code == 0, down.stderr
        assert second.end().code == 130
    assert "exit code 130" in second.site.run("status", config).stdout
    assert second.site.run("down", config).code == 1


def test_a_stage_that_will_never_fit_is_not_waited_for(tmp_path: Path) -> None:
    ran = site_at(tmp_path, "second", 0.99).up("--wait-for-memory", "60s")
    assert (ran.code, "waiting" in ran.stderr) == (78, False)


@pytest.mark.parametrize("text", ["60", "soon", "-1s", "9999999h", "9" * 400 + "h"])
def test_a_wait_that_is_no_duration_is_wrong_usage(tmp_path: Path, text: str) -> None:
    site = site_at(tmp_path, "second", 0.6)
    ran = site.up(f"--wait-for-memory={text}")
    assert (ran.code, "cannot read --wait-for-memory" in ran.stderr) == (64, True)
    assert os.listdir(tmp_path) == ["second"]


def test_a_killed_waiter_is_not_waited_for(tmp_path: Path) -> None:
    with others_hold_half(tmp_path):
        second = Waiting(site_at(tmp_path, "second", 0.6), "--wait-for-memory", "60s")
        second.until("free now")
        second.end(signal.SIGKILL)
        down = second.site.run("down", str(second.site.config))
        assert (down.code, "Traceback" in down.stderr) == (1, False)
        assert "died without cleaning up" in second.site.run("status", str(second.site.config)).stdout


def test_a_deployment_that_waits_for_its_admission_is_seen_and_can_be_stopped(tmp_path: Path) -> None:
    # Its budget is forecast, in which its engine hangs.
    site = site_at(tmp_path, "only", 0.4, options={"fault": "import:hang"})
    del site.stages[0]["utilization"]
    site.stages[0]["budget"] = "auto"
    going = Waiting(site)
    with ExitStack() as stack:
        stack.callback(going.process.kill)
        going.until("working out the budget of alpha")
        status = site.run("status", str(site.config))
        assert f"only: waiting for its admission (supervisor pid {going.supervisor})" in status.stdout
        second = site.run("up", str(site.config))
        assert (second.code, f"supervisor pid {going.supervisor}" in second.stderr) == (75, True)
        assert site.run("down", str(site.config)).code == 0
        ran = going.end()
    assert ran.code == 130
    assert "stagelaunch: interrupted" in ran.stderr
