"""``stagelaunch smoke``: boot, probe, stop and look for leftovers, with test reports for CI."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from stagelaunch.cli.interrupts import Interrupts
from stagelaunch.cli.smoke_boot import SmokeBoot
from stagelaunch.cli.smoke_voice import ReportFiles, SmokeVoice
from stagelaunch.cli.target import CONFIG_SUFFIXES, find_target
from stagelaunch.core.errors import ExitCode, StagelaunchError, UsageError
from stagelaunch.core.smoke import Evidence, SmokeReport, SmokeRun, cases, exit_code
from stagelaunch.core.units import parse_duration

ENDS_IT = (ExitCode.INTERRUPTED, ExitCode.CONFIG, ExitCode.USAGE, ExitCode.CLEANUP_INCOMPLETE)
"""After these another boot would say the same, or nothing that can be trusted."""


@click.command()
@click.argument("config")
@click.option("--repeat", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many boots.")
@click.option("--junit", "junit_file", type=click.Path(path_type=Path), help="Write a JUnit XML report here.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write a JSON report here.")
@click.option("--timeout", "timeout_text", metavar="DURATION", help="Longest time of one boot with its probes (10m).")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where sockets and logs go.")
def smoke(
    config: str,
    repeat: int,
    junit_file: Path | None,
    json_file: Path | None,
    timeout_text: str | None,
    runtime_dir: Path | None,
) -> int:
    """Boot the deployment in CONFIG, probe every stage through its graph, stop it, and look for what is left.

    Exit 0 when all of it was good in every boot, else with the code of the first boot that was not, 1 for a probe. A
    SIGINT or SIGTERM ends it within 6 s, reports written; a second one kills at once.
    """
    if not config.endswith(CONFIG_SUFFIXES):
        raise UsageError(f"{config!r} is not a config file; `smoke` takes the path of a *.yaml or *.json file")
    timeout_s = None if timeout_text is None else _parse_timeout(timeout_text)
    files, voice = ReportFiles(junit_file, json_file), SmokeVoice(os.environ)
    with Interrupts() as interrupts:
        for report in _reports(config, repeat, runtime_dir, timeout_s, interrupts, voice):
            # After each, so that nothing is lost should this process be killed.
            files.write(report, is_final=False)
        written = files.write(report, is_final=True)
        voice.end(report)
    return report.exit_code or written


def _reports(
    config: str,
    repeat: int,
    runtime_dir: Path | None,
    timeout_s: float | None,
    interrupts: Interrupts,
    voice: SmokeVoice,
) -> Iterator[SmokeReport]:
    """The report as it grows, at least one: after each boot, until all are done or another would make no sense."""
    try:
        target = find_target(config, runtime_dir)
    except StagelaunchError as error:
        report = SmokeReport(Path(config).stem, repeat, (_refused(error),))
        voice.run_over(report)
        yield report
        return
    report = SmokeReport(target.name, repeat)
    assert target.loaded is not None
    for number in range(1, repeat + 1):
        with voice.boot(report, number) as on_line:
            boot = SmokeBoot(config, target, target.loaded, runtime_dir, timeout_s, interrupts, on_line)
            run = _run(number, boot)
        report = replace(report, runs=(*report.runs, run))
        voice.run_over(report)
        yield report
        if run.exit_code in ENDS_IT:
            return


def _run(number: int, boot: SmokeBoot) -> SmokeRun:
    began, began_s = _now(), time.monotonic()
    seen = boot.run()
    return SmokeRun(number, cases(seen), exit_code(seen), began, time.monotonic() - began_s, tuple(boot.lines))


def _refused(error: StagelaunchError) -> SmokeRun:
    """A config that cannot be read has no stages yet: one red case."""
    seen = Evidence(exit_code=int(error.exit_code), text=str(error))
    return SmokeRun(1, cases(seen), exit_code(seen), _now(), 0.0)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _parse_timeout(text: str) -> float:
    try:
        return parse_duration(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"cannot read --timeout {text!r}: {error}; write 90s, or 10m") from None
