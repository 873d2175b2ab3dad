"""``stagelaunch report``: what a boot spent its time with, from the timeline that its supervisor has written."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from stagelaunch.cli.smoke_voice import is_stream, write_to_stream
from stagelaunch.cli.target import find_target
from stagelaunch.core.errors import ExitCode, NotRunningError, TimelineError, UsageError
from stagelaunch.core.timeline import Timeline, from_json
from stagelaunch.core.timeline_text import render, report_json
from stagelaunch.core.trace import to_trace
from stagelaunch.supervisor.runtime import Runtime, list_runtimes, write_atomically
from stagelaunch.system.regular import read_regular

STDOUT = Path("-")
_OUT = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


@click.command()
@click.argument("target", required=False)
@click.option("--json", "json_file", type=_OUT, metavar="FILE", help="Write all of it as JSON; - instead of the page.")
@click.option("--trace", "trace_file", type=_OUT, metavar="FILE", help="Write a trace for Perfetto; - as above.")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where deployments keep their sockets.")
def report(target: str | None, json_file: Path | None, trace_file: Path | None, runtime_dir: Path | None) -> int:
    """Show how the deployment TARGET (its name or config file) booted, or did not: the only one here, if none is named.

    Also while it boots, and after its end. Exit 1 when nothing has booted there, 78 when its record is damaged.
    """
    if STDOUT == json_file == trace_file:
        raise UsageError("only one of --json and --trace can go to stdout: name a file for the other")
    runtime = find_target(target, runtime_dir).runtime if target is not None else _only_one(runtime_dir)
    timeline = _read(runtime)
    if timeline.state in ("booting", "ready"):
        if runtime.live_pid() is None:
            said = f"{timeline.deployment}: its supervisor is gone; this is what it wrote last"
            click.echo(f"stagelaunch: {said}", err=True)
        else:
            # Written when something happens; what is under way goes on.
            timeline = replace(timeline, as_of_s=max(timeline.as_of_s, time.time() - timeline.started_at))
    if STDOUT not in (json_file, trace_file):
        click.echo(render(timeline))
    written = [
        _write(json_file, "--json", report_json(timeline)),
        _write(trace_file, "--trace", to_trace(timeline)),
    ]
    return max(written)


def _only_one(runtime_dir: Path | None) -> Runtime:
    found = [runtime for runtime in list_runtimes(runtime_dir) if runtime.timeline.exists()]
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotRunningError("cannot report: no deployment has booted here; name one, or its config file")
    raise UsageError(f"name a deployment: {', '.join(runtime.directory.name for runtime in found)}")


def _read(runtime: Runtime) -> Timeline:
    path = runtime.timeline
    try:
        return from_json(json.loads(read_regular(path)))
    except FileNotFoundError:
        raise NotRunningError(
            f"cannot report on {runtime.directory.name}: it has started no stage, or its record {path} was removed; "
            f"give its config file if that sets runtime_dir"
        ) from None
    except OSError as error:
        raise TimelineError(f"cannot read {path}: {error.strerror}; boot again to have it written anew") from error
    except (ValueError, RecursionError) as error:
        said = str(error) if type(error) is ValueError else "it is not JSON"
        raise TimelineError(f"cannot read {path}: {said}; boot again to have it written anew") from error


def _write(path: Path | None, option: str, body: dict[str, Any]) -> ExitCode:
    if path is None:
        return ExitCode.OK
    text = json.dumps(body, indent=1) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        return ExitCode.OK
    try:
        if is_stream(path):
            write_to_stream(path, text)
        else:
            write_atomically(path.resolve(), text)
    except OSError as error:
        click.echo(f"stagelaunch: cannot write {option} {path}: {error.strerror}; name another file", err=True)
        return ExitCode.TEMPORARY
    return ExitCode.OK
