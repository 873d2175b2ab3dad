"""A smoke test as JUnit XML, as CI services read it: one suite a boot, one class a stage, one case a phase. Pure."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from stagelaunch.core.smoke import Case, SmokeReport, SmokeRun, Verdict

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML 1.0 document may hold, not even escaped."""


def xml_text(text: str) -> str:
    """The text without colours and without characters that XML forbids."""
    return _FORBIDDEN.sub("", _ANSI.sub("", text))


def junit_xml(report: SmokeReport) -> str:
    """The whole document."""
    attributes = {"name": report.deployment, **_counts(report), "time": _seconds(_took_s(report))}
    root = ET.Element("testsuites", attributes)
    for run in report.runs:
        _add_suite(root, report, run)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _add_suite(root: ET.Element, report: SmokeReport, run: SmokeRun) -> None:
    name = report.deployment if report.repeat == 1 else f"{report.deployment} [{run.number}/{report.repeat}]"
    attributes = {"name": name, **_counts(run), "time": _seconds(run.took_s), "timestamp": run.began}
    suite = ET.SubElement(root, "testsuite", attributes)
    for case in run.cases:
        _add_case(suite, report, run, case)
    if run.lines:
        ET.SubElement(suite, "system-out").text = xml_text("\n".join(run.lines))


def _add_case(suite: ET.Element, report: SmokeReport, run: SmokeRun, case: Case) -> None:
    element = ET.SubElement(
        suite,
        "testcase",
        classname=f"{report.deployment}.{case.part}",
        name=report.case_name(run, case),
        time=_seconds(case.took_s),
    )
    match case.verdict:
        case Verdict.FAILED:
            failure = ET.SubElement(element, "failure", message=xml_text(case.message), type=case.name)
            failure.text = xml_text(case.details)
        case Verdict.SKIPPED:
            ET.SubElement(element, "skipped", message=xml_text(case.message))


def _counts(of: SmokeReport | SmokeRun) -> dict[str, str]:
    failed, skipped = of.count(Verdict.FAILED), of.count(Verdict.SKIPPED)
    tests = failed + skipped + of.count(Verdict.PASSED)
    return {"tests": str(tests), "failures": str(failed), "errors": "0", "skipped": str(skipped)}


def _took_s(report: SmokeReport) -> float:
    return sum(run.took_s for run in report.runs)


def _seconds(duration_s: float) -> str:
    return f"{duration_s:.3f}"
