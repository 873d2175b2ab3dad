"""After the boot: a stage that dies is started again, alone or with all, within its budget; or it takes all along."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from deployments import Ran, Site, light_stage

from stagelaunch.devices.simfile import SimulatedFile


@pytest.fixture
def site(tmp_path: Path) -> Site:
    timeouts = {"phase": "30s", "stage": "50s", "boot": "70s", "lock": "40s", "stop": "3s", "memory": "1s"}
    return Site(tmp_path, [light_stage(0, "alpha", 0), light_stage(1, "beta", 1)], {"timeouts": timeouts})


class Up:
    """A deployment in the foreground whose lines are read one by one."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.process = site.start("up", str(site.write()), "--quiet")
        self.lines: list[str] = []
        assert self.process.stdout is not None
        assert "site: ready" in self.process.stdout.readline()

    def wait_for(self, text: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"ended without {text!r}: {''.join(self.lines)}")

    def stages(self) -> dict[str, dict[str, Any]]:
        body = json.loads(self.site.run("status", str(self.site.config), "--json").stdout)
        return {stage["name"]: stage for stage in body["stages"]}

    def finish(self) -> Ran:
        _, stderr = self.process.communicate(timeout=60)
        return Ran(self.process.returncode, "", "".join(self.lines) + stderr)


def test_a_stage_that_dies_is_started_again_alone_until_it_does_not_fit_any_more(site: Site) -> None:
    site.top |= {"on_failure": "restart-stage", "restarts": {"max": 2, "backoff": "100ms"}}
    up = Up(site)
    before = up.stages()
    os.kill(before["beta"]["pid"], signal.SIGKILL)
    up.wait_for("every stage is ready again")
    after = up.stages()
    assert after["alpha"]["pid"] == before["alpha"]["pid"]
    assert after["beta"]["pid"] != before["beta"]["pid"]
    assert after["beta"]["ledger"]["num_blocks"] == before["beta"]["ledger"]["num_blocks"]
    assert [after[name]["restarts"] for name in ("alpha", "beta")] == [0, 1]

    # Somebody takes what the stage would need while it is down: the last restart is refused, and that stops all.
    file = SimulatedFile.open(site.machine())
    os.kill(after["beta"]["pid"], signal.SIGSTOP)
    file.set_foreign_bytes(1, 700 << 20)
    os.kill(after["beta"]["pid"], signal.SIGKILL)
    up.wait_for("FAILED in its restart")
    file.set_foreign_bytes(1, 0)
    file.close()
    ran = up.finish()
    assert ran.code == 1, ran.stderr
    first = site.state()["first_failure"]
    assert (first["stage"], first["phase"], first["error"]) == ("beta", "spawn", "admission")
    assert "is free now" in first["text"]
    assert "is not started again: 2 restarts within" in ran.stderr
    assert json.loads((site.directory / "run" / "site" / "error.json").read_text())["first_failure"] == first
    site.assert_nothing_left(ran)


def test_all_are_started_again_until_the_budget_is_used_up(site: Site) -> None:
    site.top |= {"on_failure": "restart-all", "restarts": {"max": 1, "backoff": "100ms"}}
    up = Up(site)
    before = up.stages()
    os.kill(before["beta"]["pid"], signal.SIGKILL)
    up.wait_for("everything is started again")
    up.wait_for("beta (pid")
    assert up.process.stdout is not None
    while "site: ready" not in up.process.stdout.readline():
        continue
    after = up.stages()
    assert not {stage["pid"] for stage in before.values()} & {stage["pid"] for stage in after.values()}
    os.kill(after["alpha"]["pid"], signal.SIGKILL)
    ran = up.finish()
    assert ran.code == 1, ran.stderr
    assert "1 restarts within" in ran.stderr
    assert site.state()["first_failure"]["stage"] == "alpha"
    site.assert_nothing_left(ran)


def test_a_stop_during_the_pause_ends_it_with_the_failure(site: Site) -> None:
    site.stages = site.stages[:1]
    site.top |= {"on_failure": "restart-all", "restarts": {"max": 1, "backoff": "50s"}}
    up = Up(site)
    os.kill(up.stages()["alpha"]["pid"], signal.SIGKILL)
    up.wait_for("everything is started again")
    assert "waiting for its restart" in site.run("status", str(site.config)).stdout
    assert site.run("down", str(site.config)).code == 0
    ran = up.finish()
    assert (ran.code, "is not started again: asked to stop" in ran.stderr) == (1, True), ran.stderr
    assert site.state()["first_failure"]["signal"] == "SIGKILL"
    site.assert_nothing_left(ran)


def test_a_stop_when_all_is_over_but_the_memory_is_not_forgotten(site: Site) -> None:
    site.stages = site.stages[:1]
    site.top["timeouts"] |= {"memory": "40s"}
    site.top |= {"on_failure": "restart-all", "restarts": {"max": 1, "backoff": "10ms"}}
    up = Up(site)
    pid = up.stages()["alpha"]["pid"]
    # Somebody else takes what must come back: until it is gone, the end is waited for.
    file = SimulatedFile.open(site.machine())
    file.set_foreign_bytes(0, 700 << 20)
    os.kill(pid, signal.SIGKILL)
    up.wait_for("ended (SIGKILL)")
    up.process.send_signal(signal.SIGTERM)
    up.wait_for("stopping: SIGTERM")
    file.set_foreign_bytes(0, 0)
    file.close()
    ran = up.finish()
    assert (ran.code, "started again" in ran.stderr) == (1, False), ran.stderr
    site.assert_nothing_left(ran)
