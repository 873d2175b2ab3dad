"""A stage fails, in each phase and each way: the culprit is named, the exit code is right, nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deployments import Ran, Site, three_stages

from stagelaunch.core.inventory import simulated_uuid
from stagelaunch.core.phases import LockMode
from stagelaunch.system.locks import DeviceLocks, LockDirectory

PHASES = ("import", "context", "load", "profile", "size", "allocate", "capture")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Two stages on one device: beta, which fails, and gamma, which is in some phase then."""
    return Site(tmp_path, three_stages()[1:])


def fail(site: Site, fault: str) -> Ran:
    site.stages[0]["options"] = {"fault": fault}
    ran = site.up()
    site.assert_nothing_left(ran)
    return ran


@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_in_each_phase(site: Site, phase: str) -> None:
    ran = fail(site, f"{phase}:raise")
    assert ran.code == 1
    assert f"stage beta failed in phase {phase}" in ran.stderr
    # The child's own traceback, down to the line that raised.
    assert "raise InjectedError" in ran.stderr
    assert site.state()["first_failure"]["stage"] == "beta"
    assert "consequence" not in ran.stderr


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sysexit", "3"),
        # Longer than any line the supervisor takes.
        ("verbose", "characters left out"),
        ("osexit", "exited with code 5"),
        ("sigkill", "killed by SIGKILL"),
        ("segv", "killed by SIGSEGV"),
        ("abort", "killed by SIGABRT"),
    ],
)
def test_each_way_to_die(site: Site, kind: str, said: str) -> None:
    ran = fail(site, f"profile:{kind}")
    assert ran.code == 1
    assert "stage beta failed in phase profile" in ran.stderr
    assert said in ran.stderr
    if kind in ("segv", "abort"):
        # faulthandler's words, from the stage's own log.
        assert "light_engine.py" in ran.stderr


def test_the_evidence_is_of_this_run_and_not_of_an_earlier_one(site: Site) -> None:
    assert "InjectedError" in fail(site, "import:raise").stderr
    ran = fail(site, "import:sigkill")
    assert "killed by SIGKILL" in ran.stderr
    assert "InjectedError" not in ran.stderr


def test_a_child_of_a_stage_goes_with_it(site: Site) -> None:
    ran = fail(site, "load:fork")
    assert ran.code == 1
    # assert_nothing_left has looked for it: its pid is among those that were said.
    assert "left behind (pid" in ran.stderr


@pytest.mark.parametrize("kind", ["sigstop", "ignoreterm"])
def test_a_stage_that_hangs_runs_into_its_phase_deadline_and_is_removed(site: Site, kind: str) -> None:
    site.top["timeouts"] = {"phase": "12s", "stage": "40s", "boot": "60s", "lock": "30s", "stop": "1s"}
    ran = fail(site, f"load:{kind}")
    assert ran.code == 1
    assert "stage beta failed in phase load" in ran.stderr
    assert "phase deadline" in ran.stderr


def test_the_boot_deadline_names_who_was_waited_for(site: Site) -> None:
    # gamma starts when beta is ready, seconds into the boot: its own deadlines come after the boot's.
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
