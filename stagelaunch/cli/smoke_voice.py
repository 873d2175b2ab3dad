"""What ``smoke`` says while it runs, to people and to a CI service, and the report files it leaves."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from stagelaunch.cli.streams import is_file
from stagelaunch.core.annotations import end_group, error, group, resume, stop_commands
from stagelaunch.core.errors import ExitCode, UsageError
from stagelaunch.core.junit import junit_xml
from stagelaunch.core.smoke import SmokeReport, Verdict
from stagelaunch.core.smoke_text import markdown, report_json, run_lines, summary_line
from stagelaunch.supervisor.runtime import write_atomically


class SmokeVoice:
    """Cases go to stdout, what the boot says to stderr; on GitHub Actions everything to stdout, in folded groups."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._on_actions = environment.get("GITHUB_ACTIONS") == "true"
        self._summary_file = environment.get("GITHUB_STEP_SUMMARY")

    @contextmanager
    def boot(self, report: SmokeReport, number: int) -> Iterator[Callable[[str], None]]:
        """One boot; the lines it says are given to what this yields."""
        if not self._on_actions:
            yield lambda line: click.echo(line, err=True)
            return
        # Stages and libraries have a say in these lines: nothing in them may be a command.
        token = secrets.token_hex(16)
        click.echo(group(f"boot {number} of {report.repeat}"))
        click.echo(stop_commands(token))
        try:
            yield click.echo
        finally:
            click.echo(resume(token))
            click.echo(end_group())

    def run_over(self, report: SmokeReport) -> None:
        """The cases of the last boot."""
        run = report.runs[-1]
        token = secrets.token_hex(16)
        lines = run_lines(run)
        if self._on_actions:
            lines = [stop_commands(token), *lines, resume(token)]
            for case in run.cases:
                if case.verdict is Verdict.FAILED:
                    title = f"{report.deployment}: {case.part}: {report.case_name(run, case)}"
                    lines.append(error(title, case.details or case.message))
        click.echo("\n".join(lines))

    def end(self, report: SmokeReport) -> None:
        """The last word, and the summary of the job's page."""
        click.echo(summary_line(report))
        if self._summary_file:
            try:
                with open(self._summary_file, "a", encoding="utf-8") as file:
                    file.write(markdown(report))
            except OSError as failure:
                click.echo(f"stagelaunch: cannot write the step summary: {failure.strerror}", err=True)


@dataclass(frozen=True)
class ReportFiles:
    """Where the reports go. UsageError, before anything is started, for a place that cannot be written."""

    junit: Path | None
    json: Path | None

    def __post_init__(self) -> None:
        for option, path in (("--junit", self.junit), ("--json", self.json)):
            if path is not None and not path.parent.is_dir():
                raise UsageError(f"cannot write {option} {path}: there is no directory {path.parent}; make it")
            if path is not None and path.is_dir():
                raise UsageError(f"cannot write {option} {path}: it is a directory; name a file")

    def write(self, report: SmokeReport, *, is_final: bool) -> ExitCode:
        """Both, each atomically; what is no file (a pipe, a terminal) gets the final one alone. OK, or TEMPORARY when
        one cannot be written, which is said."""
        code = ExitCode.OK
        for path, text in ((self.junit, junit_xml), (self.json, report_json)):
            if path is None:
                continue
            try:
                if not is_stream(path):
                    write_atomically(path.resolve(), text(report))
                elif is_final:
                    write_to_stream(path, text(report))
            except OSError as failure:
                click.echo(f"stagelaunch: cannot write {path}: {failure.strerror}", err=True)
                code = ExitCode.TEMPORARY
        return code


def is_stream(path: Path) -> bool:
    """Whether replacing it would lose it: it is no regular file, or our own stdout or stderr goes there."""
    try:
        return not stat.S_ISREG(path.stat().st_mode) or _own_output(path) is not None
    except FileNotFoundError:
        return False


def _own_output(path: Path) -> int | None:
    return next((fd for fd in (1, 2) if is_file(fd, path)), None)


def write_to_stream(path: Path, text: str) -> None:
    """To what is no regular file, or is our own output. OSError when it does not take it."""
    own = _own_output(path)
    if own is not None:
        # The same open file: another one of it would write over what is there.
        fd = os.dup(own)
    else:
        # Not blocking while it is opened: nobody may ever open the other end of a FIFO.
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(fd, True)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
