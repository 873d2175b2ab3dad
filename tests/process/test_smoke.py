"""``stagelaunch smoke`` with the light engine: good, failing, interrupted; its reports, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployments import ROOT, Ran, Site, is_gone, light_stage

from stagelaunch.cli.interrupts import Interrupted, Interrupts
from stagelaunch.cli.main import main
from stagelaunch.cli.smoke_boot import AGAIN_WAIT_S, SmokeBoot
from stagelaunch.cli.smoke_voice import ReportFiles, SmokeVoice
from stagelaunch.cli.target import find_target
from stagelaunch.core.errors import ExitCode
from stagelaunch.core.smoke import SmokeReport
from stagelaunch.system.marked import MARK, command_of, marked_pids
from stagelaunch.system.tree import wait_for_ends

WINDOW_S = 6.0


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, [light_stage(0, "alpha", 0), light_stage(1, "beta", 1)])


class Reports:
    def __init__(self, site: Site) -> None:
        self.junit, self.json = site.directory / "junit.xml", site.directory / "smoke.json"
        self.options = ("--junit", str(self.junit), "--json", str(self.json))

    def read(self) -> dict[str, Any]:
        """The JSON, after a look that the JUnit file tells the same cases."""
        body: dict[str, Any] = json.loads(self.json.read_text())
        root = ET.parse(self.junit).getroot()
        assert root.get("failures") == str(body["failed"])
        assert len(list(root.iter("testcase"))) == sum(len(run["cases"]) for run in body["runs"])
        return body

    def verdicts(self, number: int = 1) -> dict[str, str]:
        cases = self.read()["runs"][number - 1]["cases"]
        return {f"{case['part']}.{case['name']}": case["verdict"] for case in cases}


def test_two_good_boots_of_the_shipped_engine(tmp_path: Path) -> None:
    shipped = yaml.safe_load((ROOT / "configs" / "own-engine.yaml").read_text())
    own = {"name": "site", "lock_dir": "locks", "runtime_dir": "run"}
    own["simulated"] = {**shipped["simulated"], "file": "devices"}
    site = Site(tmp_path, shipped["stages"], {**shipped, **own}, ROOT / "configs")
    reports = Reports(site)
    ran = site.run("smoke", str(site.write()), "--repeat", "2", *reports.options)
    assert ran.code == 0, ran.stderr
    body = reports.read()
    assert (body["exit_code"], body["failed"], body["skipped"], len(body["runs"])) == (0, 0, 0, 2)
    for run in body["runs"]:
        assert len(run["cases"]) == 13
        took = {case["name"]: case["took_s"] for case in run["cases"] if case["part"] == "decoder"}
        # Its libraries are imported before it is forked.
        assert took["spawn"] > 0.1
        assert 0 < took["probe"] < took["spawn"]
    assert "site: 26 passed, 0 failed, 0 skipped in 2 of 2 boots" in ran.stdout
    site.assert_nothing_left(ran)


def test_a_stage_that_fails_in_capture_is_the_red_case(site: Site) -> None:
    site.stages[1]["options"] = {"fault": "capture:raise"}
    reports, summary = Reports(site), site.directory / "summary.md"
    process = subprocess.run(
        [sys.executable, "-m", "stagelaunch", "smoke", str(site.write()), *reports.options],
        cwd=ROOT, env={**site.environment(), "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert process.returncode == 1, process.stderr
    verdicts = reports.verdicts()
    assert [name for name, verdict in verdicts.items() if verdict == "failed"] == ["beta.capture"]
    assert verdicts["beta.allocate"] == verdicts["deployment.memory"] == verdicts["deployment.processes"] == "passed"
    assert verdicts["alpha.probe"] == verdicts["beta.probe"] == "skipped"
    (failure,) = ET.parse(reports.junit).getroot().iter("failure")
    assert "raise InjectedError" in (failure.text or "")
    (annotation,) = [line for line in process.stdout.splitlines() if line.startswith("::error ")]
    assert annotation.startswith("::error title=site%3A beta%3A capture::stage beta failed in phase capture after ")
    assert "::group::boot 1 of 1" in process.stdout
    assert "**FAILED**" in summary.read_text()
    # On Actions what the boot says is in the folded group.
    site.assert_nothing_left(Ran(process.returncode, process.stdout, process.stdout))


def test_an_interruption_during_a_boot_that_ignores_term_ends_in_time_with_reports(site: Site) -> None:
    site.stages = site.stages[:1]
    site.stages[0]["options"] = {"fault": "load:ignoreterm"}
    # More than the window: who interrupts cannot wait for it.
    site.top["timeouts"] = {"phase": "30s", "stage": "50s", "boot": "70s", "lock": "40s", "stop": "20s"}
    reports = Reports(site)
    process = site.start("smoke", str(site.write()), *reports.options, "--repeat", "3")
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "context -> load" in line:
            break
    interrupted_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    took_s = time.monotonic() - interrupted_s
    assert process.returncode == 130, stderr
    assert took_s < WINDOW_S
    verdicts = reports.verdicts()
    assert {name for name, verdict in verdicts.items() if verdict == "passed"} >= {"alpha.import", "alpha.context"}
    assert verdicts["alpha.load"] == verdicts["alpha.probe"] == "skipped"
    assert verdicts["deployment.processes"] == "passed"
    assert "in 1 of 3 boots" in stdout
    assert (pids := Ran(130, stdout, said).pids) != set()
    assert [pid for pid in pids if not is_gone(pid)] == []
    assert all((info.free_bytes, info.processes) == (info.total_bytes, ()) for info in site.devices().values())


def test_a_killed_smoke_takes_its_boot_along(site: Site) -> None:
    site.stages = site.stages[:1]
    process = site.start("smoke", str(site.write()))
    assert process.stderr is not None
    assert any("started on device" in line for line in process.stderr)
    state = site.state()
    warden = os.pidfd_open(state["warden"]["pid"])
    process.kill()
    process.communicate()
    try:
        assert wait_for_ends([warden], time.monotonic() + WINDOW_S)
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(warden, signal.SIGKILL)
        os.close(warden)
    # In good order: it was not merely killed.
    assert (site.state()["state"], site.state()["exit_code"]) == ("ended", 130)
    site.assert_nothing_left(Ran(0, "", ""))


def test_a_report_goes_through_links_and_into_pipes_and_replaces_neither(tmp_path: Path) -> None:
    old, link, fifo, stdout = tmp_path / "old.json", tmp_path / "link", tmp_path / "fifo", tmp_path / "stdout"
    old.write_text("old")
    link.symlink_to(old)
    os.mkfifo(fifo)
    report = SmokeReport("site", 1)
    # Nobody reads yet: that is said, and holds nobody up.
    assert ReportFiles(fifo, link).write(report, is_final=True) == ExitCode.TEMPORARY
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for is_final in (False, True):
        assert ReportFiles(fifo, link).write(report, is_final=is_final) == ExitCode.OK
    os.set_blocking(reader, True)
    with open(reader, encoding="utf-8") as pipe:
        assert ET.fromstring(pipe.read()).tag == "testsuites"
    assert link.is_symlink()
    assert fifo.is_fifo()
    assert json.loads(old.read_text())["deployment"] == "site"

    saved = os.dup(1)
    with stdout.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        try:
            os.write(1, b"before")
            ReportFiles(None, Path("/dev/stdout")).write(report, is_final=True)
            os.write(1, b"after")
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    text = stdout.read_text()
    assert (text.startswith("before{"), text.endswith("}\nafter")) == (True, True)


def test_the_first_signal_ends_what_waits_and_the_next_are_counted() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted), interrupts.armed():
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.count == 2
        with pytest.raises(Interrupted), interrupts.armed():
            pytest.fail("went on")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_leaves_a_boot_that_does_not_listen_no_more_time(site: Site, spawn: Any) -> None:
    deaf = spawn("import signal; signal.signal(2, signal.SIG_IGN); print('up', flush=True); signal.pause()")
    assert deaf.stdout is not None
    deaf.stdout.readline()
    target = find_target(str(site.write()), None)
    assert target.loaded is not None
    with Interrupts() as interrupts:
        boot = SmokeBoot(str(site.config), target, target.loaded, None, None, interrupts, print)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        boot.end(deaf)
    assert deaf.returncode == -signal.SIGKILL
    assert interrupts.first_at_s is not None
    assert time.monotonic() - interrupts.first_at_s < AGAIN_WAIT_S + 1.5


def test_whatever_a_boot_has_started_is_found_by_its_mark() -> None:
    """A grandchild in a session of its own, whose parent is gone: nothing but the mark leads to it."""
    script = """
import os, signal
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
signal.pause()
"""
    mark = f"test-{os.getpid()}"
    assert marked_pids(mark) == ()
    child = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    child.wait()
    try:
        assert marked_pids(mark) == (grandchild,)
        assert "signal.pause()" in command_of(grandchild)
    finally:
        os.kill(grandchild, signal.SIGKILL)
    assert is_gone(grandchild)
    child.stdout.close()
    assert marked_pids(mark) == ()


def test_nothing_a_boot_says_is_a_command_on_actions(capsys: pytest.CaptureFixture[str]) -> None:
    with SmokeVoice({"GITHUB_ACTIONS": "true"}).boot(SmokeReport("site", 2), 1) as on_line:
        on_line("::error::not ours")
    begin, stop, line, resume, end = capsys.readouterr().out.splitlines()
    assert (begin, line, end) == ("::group::boot 1 of 2", "::error::not ours", "::endgroup::")
    token = stop.removeprefix("::stop-commands::")
    assert len(token) == 32
    assert resume == f"::{token}::"


def test_what_cannot_be_tested_is_said_before_anything_is_started(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    config = str(site.write())
    for arguments, text in (
        (("site",), "is not a config file"),
        ((config, "--timeout", "5"), "cannot read --timeout"),
        ((config, "--junit", str(site.directory / "nowhere" / "x.xml")), "there is no directory"),
    ):
        code = main(["smoke", *arguments])
        assert (code, text in capfd.readouterr().err) == (64, True)
    site.stages[0]["devices"] = []
    reports = Reports(site)
    assert main(["smoke", str(site.write()), *reports.options]) == 78
    assert reports.verdicts()["deployment.admission"] == "failed"
    assert not (site.directory / "run").exists()
