"""The evidence of a boot as test cases, and the cases as reports."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest

from stagelaunch.cli.smoke_boot import probe_error
from stagelaunch.core import annotations as workflow
from stagelaunch.core.junit import junit_xml
from stagelaunch.core.phases import BOOT_PHASES
from stagelaunch.core.smoke import (
    STAGE_CASES,
    Case,
    Evidence,
    Probed,
    SmokeReport,
    SmokeRun,
    Verdict,
    cases,
    exit_code,
)
from stagelaunch.core.smoke_text import markdown, report_json, run_lines, summary_line

PASSED, FAILED, SKIPPED = Verdict.PASSED, Verdict.FAILED, Verdict.SKIPPED


def body(phase: str, *done: str) -> dict[str, Any]:
    return {"phase": phase, "phases": [{"phase": each, "took_s": 0.5} for each in done]}


def failure(stage: str | None, phase: str | None, text: str = "injected") -> dict[str, Any]:
    return {
        "stage": stage, "phase": phase, "error": "InjectedError", "text": text, "elapsed_s": 9.0,
        "traceback": "Traceback ...\nInjectedError: injected", "log_path": "", "log_tail": [],
    }  # fmt: skip


GOOD = Evidence(
    stages=("a", "b"),
    started=True,
    admission_s=1.0,
    bodies={"a": body("stop", *BOOT_PHASES), "b": body("stop", *BOOT_PHASES)},
    exit_code=0,
    probes={"a": Probed(0.1), "b": Probed(0.1)},
    stop_s=2.0,
    memory=(),
    processes=(),
)
HALF = BOOT_PHASES[:4]
BROKEN = replace(
    GOOD,
    bodies={"a": body("stop", *HALF), "b": body("stop", *BOOT_PHASES[:2])},
    exit_code=1,
    failure=failure("a", BOOT_PHASES[4]),
    probes={},
)


def of(seen: Evidence, verdict: Verdict) -> set[tuple[str, str]]:
    return {(case.part, case.name) for case in cases(seen) if case.verdict is verdict}


def case(seen: Evidence, part: str, name: str) -> Case:
    (found,) = [case for case in cases(seen) if (case.part, case.name) == (part, name)]
    return found


def test_a_good_boot_has_a_green_case_for_each_stage_and_phase_and_three_more() -> None:
    assert len(cases(GOOD)) == 2 * len(STAGE_CASES) + 3
    assert of(GOOD, FAILED) | of(GOOD, SKIPPED) == set()
    assert case(GOOD, "a", "load").took_s == 0.5
    assert exit_code(GOOD) == 0


def test_the_culprit_is_red_in_its_phase_and_what_was_never_reached_is_skipped() -> None:
    assert of(BROKEN, FAILED) == {("a", "profile")}
    red = case(BROKEN, "a", "profile")
    assert red.message == "stage a failed in phase profile after 9.00s: injected"
    assert "InjectedError: injected" in red.details
    assert red.took_s == 9.0 - 4 * 0.5
    assert {name for part, name in of(BROKEN, PASSED) if part == "a"} == set(HALF)
    # It was stopped for the other's sake, and stopped well.
    assert {name for part, name in of(BROKEN, PASSED) if part == "b"} == {"spawn", "import", "stop"}
    assert case(BROKEN, "b", "context").message == "stopped, because the boot failed elsewhere"
    assert case(replace(BROKEN, consequences=(failure("b", "context", "gone"),)), "b", "context").message == (
        "consequence: stage b failed in phase context after 9.00s: gone"
    )


@pytest.mark.parametrize(
    ("seen", "red", "code"),
    [
        # Refused before anything was started.
        (Evidence(stages=("a",), exit_code=2, text="does not fit"), {("deployment", "admission")}, 2),
        (Evidence(exit_code=78, text="x.yaml: no such file"), {("deployment", "admission")}, 78),
        # The boot deadline is a failure of each stage that was not ready, in its phase.
        (
            replace(BROKEN, failure=failure(None, None), exit_code=124, text="boot not finished"),
            {("a", "profile"), ("b", "context")},
            124,
        ),
        # Died when ready, or while it was asked to stop.
        (replace(GOOD, failure=failure("b", "ready"), exit_code=1), {("b", "probe")}, 1),
        (replace(GOOD, failure=failure("b", "stop"), exit_code=1), {("b", "stop")}, 1),
        (replace(GOOD, probes={"a": Probed(0.1, "differs"), "b": Probed(0.1)}), {("a", "probe")}, 1),
        (replace(GOOD, memory=("device 1: 5 GiB less",)), {("deployment", "memory")}, 71),
        (replace(GOOD, processes=("process 7 is still alive",)), {("deployment", "processes")}, 71),
        (replace(GOOD, leftovers=("stage b: process 7 survived SIGKILL",), exit_code=71), {("b", "stop")}, 71),
        (replace(GOOD, leftovers=("device 0: still held",), exit_code=71), {("deployment", "memory")}, 71),
        # A supervisor that died is nobody's case, and still no green run.
        (replace(GOOD, exit_code=None, text="its supervisor died"), {("deployment", "processes")}, 70),
        (replace(GOOD, exit_code=70), {("deployment", "processes")}, 70),
        # Interrupted: nothing is red for that.
        (replace(BROKEN, failure=None, interrupted=True, exit_code=130), set(), 130),
        (replace(BROKEN, failure=None, interrupted=True, exit_code=None, text="killed"), set(), 130),
        (Evidence(stages=("a",), interrupted=True), set(), 130),
        (replace(BROKEN, interrupted=True), {("a", "profile")}, 130),
        (replace(BROKEN, interrupted=True, memory=("device 1: 5 GiB less",)), None, 71),
    ],
)
def test_every_way_to_end_badly_is_red_where_it_belongs(
    seen: Evidence, red: set[tuple[str, str]] | None, code: int
) -> None:
    assert exit_code(seen) == code
    if red is not None:
        assert of(seen, FAILED) == red
    names = [(case.part, case.name) for case in cases(seen)]
    assert len(names) == len(set(names)) == len(seen.stages) * len(STAGE_CASES) + 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"results": [{"through_graph": True, "max_abs_diff": 0}]}, None),
        ({"results": [{"through_graph": True, "max_abs_diff": 0.25}]}, "differs from eager by up to 0.25"),
        ({"results": [{"through_graph": False, "max_abs_diff": 0}]}, "did not run through a graph"),
        ({"results": [{"error": "boom"}]}, "boom"),
        ({"error": "no such stage is ready"}, "no such stage"),
    ],
)
def test_a_probe_is_good_only_through_the_graph_and_bit_for_bit(answer: dict[str, Any], error: str | None) -> None:
    found = probe_error(answer, wants_graph=True)
    assert (found is None) == (error is None)
    assert (error or "") in (found or "")
    if not answer.get("results", [{}])[0].get("through_graph", True):
        assert probe_error(answer, wants_graph=False) is None


NASTY = "\x1b[31mred\x1b[0m \x00\x08 <&\"'> \ud800 \ufffe tab\t ok \u2028 \U0001f600"


def report(*seen: Evidence, repeat: int | None = None) -> SmokeReport:
    runs = tuple(
        SmokeRun(number, cases(each), exit_code(each), "2026-01-02T03:04:05", 3.0, (NASTY, "::error::not ours"))
        for number, each in enumerate(seen, 1)
    )
    return SmokeReport("site", repeat or len(seen), runs)


def test_junit_reads_back_whatever_was_said() -> None:
    bad = replace(BROKEN, failure=failure("a", "profile", NASTY))
    root = ET.fromstring(junit_xml(report(GOOD, bad, repeat=3)))
    assert (root.tag, root.get("tests"), root.get("failures")) == ("testsuites", "46", "1")
    assert [suite.get("name") for suite in root] == ["site [1/3]", "site [2/3]"]
    assert root[1].get("timestamp") == "2026-01-02T03:04:05"
    (failed,) = root.iter("failure")
    assert (
        failed.get("message")
        == (
            "stage a failed in phase profile after 9.00s: red  <&\"'>   tab\t ok \u2028 \U0001f600".partition("\u2028")[
                0
            ]
        )
    )
    for suite in root:
        found = suite.findall("testcase")
        assert int(suite.get("tests", "")) == len(found) == 23
        assert int(suite.get("skipped", "")) == len(suite.findall("testcase/skipped"))
        assert "red  <&\"'>   tab\t ok" in (suite.findtext("system-out") or "")
    names = [(each.get("classname"), each.get("name")) for each in root.iter("testcase")]
    assert len(set(names)) == len(names)
    assert names[1] == ("site.a", "spawn [1/3]")


def test_workflow_commands_are_escaped_as_the_runner_reads_them() -> None:
    assert workflow.error("a: b, 100%", "50%\r\nc: d,") == "::error title=a%3A b%2C 100%25::50%25%0D%0Ac: d,"
    assert workflow.group("x\ny") == "::group::x%0Ay"
    assert [workflow.stop_commands("t"), workflow.resume("t"), workflow.end_group()] == [
        "::stop-commands::t",
        "::t::",
        "::endgroup::",
    ]
    assert len(workflow.error("t", "x" * 100_000)) < 5_000


def test_lines_summary_table_and_json_say_the_same() -> None:
    both = report(GOOD, replace(BROKEN, failure=failure("a", "profile", "a | b *c*\nsecond")))
    lines = run_lines(both.runs[1])
    (red,) = [line for line in lines if line.startswith("FAILED")]
    assert re.split(r"\s{2,}", red) == [
        "FAILED", "a", "profile", "7.00s", "stage a failed in phase profile after 9.00s: a | b *c*",
    ]  # fmt: skip
    assert all(line.startswith(("ok ", "FAILED ", "skipped ", "  | ")) for line in lines)
    assert summary_line(both) == (
        "site: 33 passed, 1 failed, 12 skipped in 2 of 2 boots, 6.00s (exit 1: a stage failed; clean-up complete)"
    )
    text = markdown(both)
    assert "| 2 | a | 0.50s | 0.50s | 0.50s | 0.50s | **FAILED** | - | - | - | - | - |" in text
    assert r"a \| b \*c\*" in text
    told = json.loads(report_json(both))
    assert (told["version"], told["exit_code"], told["passed"], told["failed"], told["skipped"]) == (1, 1, 33, 1, 12)
    assert [run["exit_code"] for run in told["runs"]] == [0, 1]
    assert told["runs"][1]["cases"][5]["verdict"] == "failed"


def test_a_report_of_nothing_is_no_success() -> None:
    assert SmokeReport("site", 1).exit_code == 130
