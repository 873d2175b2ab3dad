"""A smoke test for people and for programs: lines, a summary, a markdown table, JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from stagelaunch.core.errors import EXIT_CODE_MEANINGS, ExitCode
from stagelaunch.core.smoke import STAGE_CASES, Case, SmokeReport, SmokeRun, Verdict
from stagelaunch.core.table import table
from stagelaunch.core.units import format_duration

REPORT_VERSION = 1
_SHOWN = {Verdict.PASSED: "ok", Verdict.FAILED: "FAILED", Verdict.SKIPPED: "skipped"}


def run_lines(run: SmokeRun) -> list[str]:
    """One line a case; below a failed one its evidence."""
    rows = [(_SHOWN[case.verdict], case.part, case.name, _took(case), case.message) for case in run.cases]
    lines = []
    for case, line in zip(run.cases, table(rows, right=(3,))):
        lines.append(line)
        if case.verdict is Verdict.FAILED:
            # Marked, so that nothing in it is taken for a command of whoever reads our output.
            lines += [f"  | {said}" for said in case.details.splitlines()]
    return lines


def summary_line(report: SmokeReport) -> str:
    """``site: 66 passed, 0 failed, 0 skipped in 2 of 2 boots, 12.30s (exit 0: done)``."""
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in Verdict)
    took = format_duration(sum(run.took_s for run in report.runs))
    code = report.exit_code
    meaning = EXIT_CODE_MEANINGS[ExitCode(code)] if code in EXIT_CODE_MEANINGS else "unknown"
    boots = f"{len(report.runs)} of {report.repeat} boot{'s' if report.repeat != 1 else ''}"
    return f"{report.deployment}: {counts} in {boots}, {took} (exit {int(code)}: {meaning})"


def markdown(report: SmokeReport) -> str:
    """A heading, and a table with a row for each boot and stage."""
    lines = [f"### stagelaunch smoke: {_cell(summary_line(report))}", ""]
    lines += [f"| boot | stage | {' | '.join(STAGE_CASES)} |", f"|{'---|' * (len(STAGE_CASES) + 2)}"]
    for run in report.runs:
        for part in dict.fromkeys(case.part for case in run.cases if case.name in STAGE_CASES):
            mine = {case.name: _short(case) for case in run.cases if case.part == part}
            cells = " | ".join(mine.get(name, "") for name in STAGE_CASES)
            lines.append(f"| {run.number} | {_cell(part)} | {cells} |")
    lines += ["", *_markdown_failures(report)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_failures(report: SmokeReport) -> Iterator[str]:
    for run in report.runs:
        for case in run.cases:
            if case.verdict is Verdict.FAILED:
                yield f"- boot {run.number}, {_cell(case.part)}, {case.name}: {_cell(case.message)}"


def report_json(report: SmokeReport) -> str:
    """The report for programs; times in seconds."""
    body = {
        "version": REPORT_VERSION,
        "deployment": report.deployment,
        "repeat": report.repeat,
        "exit_code": int(report.exit_code),
        **{verdict.value: report.count(verdict) for verdict in Verdict},
        "runs": [{**asdict(run), "exit_code": int(run.exit_code)} for run in report.runs],
    }
    return json.dumps(body, indent=2) + "\n"


def _took(case: Case) -> str:
    return "" if case.verdict is Verdict.SKIPPED else format_duration(case.took_s)


def _short(case: Case) -> str:
    match case.verdict:
        case Verdict.PASSED:
            return format_duration(case.took_s)
        case Verdict.FAILED:
            return "**FAILED**"
        case _:
            return "-"


def _cell(text: str) -> str:
    """Text that stays in its cell and means nothing else."""
    plain = " ".join(text.split())
    return "".join(f"\\{char}" if char in "\\|`*_<>[]" else char for char in plain)
