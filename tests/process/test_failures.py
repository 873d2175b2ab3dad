"""A stage fails: what is beside the matrix of phases and ways (``test_fault_matrix``)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deployments import TIMEOUT_S, Ran, Site, three_stages

from stagelaunch.core.inventory import simulated_uuid
from stagelaunch.core.phases import LockMode
from stagelaunch.devices.simfile import SimulatedFile
from stagelaunch.system.locks import DeviceLocks, LockDirectory


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """beta, which fails, alone."""
    return Site(tmp_path, three_stages()[1:2])


def fail(site: Site, fault: str) -> Ran:
    site.stages[0]["options"] = {"fault": fault}
    ran = site.up()
    site.assert_nothing_left(ran)
    return ran


def test_an_error_longer_than_any_line_keeps_its_two_ends(site: Site) -> None:
    assert "characters left out" in fail(site, "profile:verbose").stderr
    report = site.run("report", str(site.config)).stdout
    assert "site: failed, not booted" in report
    assert "stage beta failed in phase profile" in report


def test_the_evidence_is_of_this_run_and_not_of_an_earlier_one(site: Site) -> None:
    assert "InjectedError" in fail(site, "import:raise").stderr
    ran = fail(site, "import:sigkill")
    assert "killed by SIGKILL" in ran.stderr
    assert "InjectedError" not in ran.stderr


def test_the_boot_deadline_names_who_was_waited_for(site: Site) -> None:
    # gamma starts when beta is ready, seconds into the boot: its own deadlines come after the boot's.
    site.stages = three_stages()[1:]
    site.top["timeouts"] = {"phase": "11.8s", "stage": "11.9s", "boot": "12s", "lock": "5s", "stop": "1s"}
    site.top["order"] = "serial"
    site.stages[1]["options"] = {"fault": "import:hang"}
    ran = site.up()
    site.assert_nothing_left(ran)
    assert ran.code == 124, ran.stderr
    assert "gamma (in phase" in ran.stderr


def test_weights_larger_than_the_device_are_an_out_of_memory_error(site: Site) -> None:
    site.stages[0]["options"] = {"weights_mib": "2000"}
    ran = site.up()
    site.assert_nothing_left(ran)
    assert ran.code == 1
    assert "stage beta failed in phase load" in ran.stderr
    assert "OutOfMemoryError" in ran.stderr


def test_a_device_lock_that_is_held_times_out_and_names_its_holder(site: Site) -> None:
    site.top["timeouts"] = {"phase": "30s", "stage": "50s", "boot": "60s", "lock": "2s", "stop": "1s"}
    locks = DeviceLocks(LockDirectory(site.directory / "locks"), [simulated_uuid(1)], owner="the-test/neighbour")
    with locks.hold(LockMode.EXCLUSIVE, phase="profile", timeout_s=1):
        ran = site.up()
    site.assert_nothing_left(ran)
    assert ran.code == 75, ran.stderr
    assert f"pid {os.getpid()} (the-test/neighbour)" in ran.stderr


def test_a_device_that_is_lost_after_the_boot_is_the_failure_of_its_stages(site: Site) -> None:
    site.top["timeouts"] = {"heartbeat": "2s", "stop": "1s", "memory": "5s"}
    process = site.start("up", str(site.write()), "--quiet")
    assert process.stdout is not None
    assert process.stderr is not None
    assert "site: ready" in process.stdout.readline()
    file = SimulatedFile.open(site.machine())
    file.set_error(1, 15)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "FAILED in ready: device 1 is not there any more" in line:
            break
    file.set_error(1, 0)
    file.close()
    _, rest = process.communicate(timeout=TIMEOUT_S)
    ran = Ran(process.returncode, "", "".join(lines) + rest)
    assert ran.code == 1, ran.stderr
    assert site.state()["first_failure"]["error"] == "device"
    site.assert_nothing_left(ran)
