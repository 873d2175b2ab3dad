"""``stagelaunch restart``: one stage of a running deployment, ended and started again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from stagelaunch.cli.target import find_stages
from stagelaunch.cli.up import parse_wait
from stagelaunch.core.errors import ControlError, ExitCode, UsageError
from stagelaunch.core.units import format_duration
from stagelaunch.supervisor.client import exchange, request
from stagelaunch.supervisor.runtime import Runtime

POLL_S = 0.2


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[TARGET] STAGE")
@click.option("--wait", is_flag=True, help="Return when the stage is ready again, or cannot be.")
@click.option("--timeout", "timeout_text", metavar="DURATION", default="10m", show_default=True, help="With --wait.")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where deployments keep their sockets.")
def restart(words: tuple[str, ...], wait: bool, timeout_text: str, runtime_dir: Path | None) -> int:
    """Stop STAGE of deployment TARGET in good order and start it again; the others go on.

    TARGET may be left out where only one deployment here has a stage of that name.
    """
    timeout_s = parse_wait(timeout_text, "--timeout")
    target, stages = find_stages(words, runtime_dir)
    if len(stages) != 1:
        raise UsageError(f"name the one stage of deployment {target.name} to start again")
    (stage,) = stages
    before = _stage(exchange(target.runtime, "GET", "/v1/health")[1], stage)
    body = request(target.runtime, "POST", f"/v1/restart?stage={quote(stage)}")
    if "error" in body:
        click.echo(f"stagelaunch: cannot restart {stage} of {target.name}: {body['error']}", err=True)
        return ExitCode.STAGE_FAILED
    click.echo(f"restarting stage {stage} of {target.name} (it was pid {before['pid']} in phase {before['phase']})")
    return _wait(target.runtime, stage, before["pid"], timeout_s) if wait else ExitCode.OK


def _wait(runtime: Runtime, name: str, old_pid: int | None, timeout_s: float) -> int:
    """Until another process of the stage is ready. NotRunningError when the deployment ends instead."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        body = exchange(runtime, "GET", "/v1/health")[1]
        stage = _stage(body, name)
        if stage["phase"] == "ready" and stage["pid"] != old_pid:
            click.echo(f"stage {name} is ready again (pid {stage['pid']})")
            return ExitCode.OK
        if body["state"] == "stopping" or time.monotonic() >= deadline_s:
            why = body["first_failure"] or f"it is {body['state']}, the stage in phase {stage['phase']}"
            click.echo(f"stagelaunch: stage {name} is not ready after {format_duration(timeout_s)}: {why}", err=True)
            return ExitCode.STAGE_FAILED if body["state"] == "stopping" else ExitCode.TEMPORARY
        time.sleep(POLL_S)


def _stage(body: dict[str, Any], name: str) -> dict[str, Any]:
    for stage in body.get("stages", ()):
        if stage["name"] == name:
            found: dict[str, Any] = stage
            return found
    raise ControlError(f"cannot restart {name}: the deployment runs without such a stage; see: stagelaunch status")
