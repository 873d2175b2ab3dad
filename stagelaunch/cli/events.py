"""``stagelaunch events``: what has happened in a run and what happens, for programs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from stagelaunch.cli.target import find_target
from stagelaunch.core.errors import ExitCode, NotRunningError
from stagelaunch.supervisor.client import stream

POLL_S = 0.1


@click.command()
@click.argument("target")
@click.option("--no-follow", is_flag=True, help="Only what has happened so far.")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where deployments keep their sockets.")
def events(target: str, no_follow: bool, runtime_dir: Path | None) -> int:
    """Print the events of the deployment TARGET since its start, one JSON object a line, until it ends.

    One that still waits for its admission is waited for.
    """
    runtime = find_target(target, runtime_dir).runtime
    while True:
        try:
            for record in stream(runtime, f"/v1/events?follow={int(not no_follow)}"):
                click.echo(json.dumps(record))
            return ExitCode.OK
        except NotRunningError:
            # Before its stages are started nothing answers; it has not ended for that.
            if runtime.live_pid() is None:
                raise
        time.sleep(POLL_S)
