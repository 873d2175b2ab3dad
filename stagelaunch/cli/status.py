"""``stagelaunch status``: what runs here and how far it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from stagelaunch.cli.pages import render_status
from stagelaunch.cli.target import find_target
from stagelaunch.core.errors import ExitCode, NotRunningError
from stagelaunch.supervisor.client import request
from stagelaunch.supervisor.leftovers import find_leftovers
from stagelaunch.supervisor.runtime import WAITS, Runtime, list_runtimes
from stagelaunch.system.tree import describe


@click.command()
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where deployments keep their sockets.")
def status(target: str | None, as_json: bool, runtime_dir: Path | None) -> int:
    """Show the deployment TARGET (its name or config file), or every deployment of this user.

    Exit 0 when TARGET, or every deployment that has not ended, is ready; 1 otherwise, and when there is none.
    """
    runtimes = list_runtimes(runtime_dir) if target is None else (find_target(target, runtime_dir).runtime,)
    bodies = [_body(runtime) for runtime in runtimes]
    if as_json:
        click.echo(json.dumps(bodies if target is None else bodies[0], indent=2))
    else:
        click.echo("\n\n".join(map(_page, bodies)) or "no deployment has run here")
    # Of those that are listed because they once ran nobody waits for anything, unless they have left something.
    live = bodies if target is not None else [body for body in bodies if not _is_over(body)]
    all_ready = bool(live) and all(body["state"] == "ready" for body in live)
    return ExitCode.OK if all_ready else ExitCode.STAGE_FAILED


def _body(runtime: Runtime) -> dict[str, Any]:
    try:
        return request(runtime, "GET", "/v1/status")
    except NotRunningError:
        if runtime.waits_for is not None:
            state = runtime.read_state()
            return {key: state.get(key) for key in ("state", "pid", "findings")} | {"name": runtime.directory.name}
        return {"name": runtime.directory.name, "state": "stopped", "last_run": _last_run(runtime)}


def _is_over(body: dict[str, Any]) -> bool:
    return body["state"] == "stopped" and not (body["last_run"] or {}).get("processes")


def _last_run(runtime: Runtime) -> dict[str, Any] | None:
    """How the last supervisor ended, if one has run; ``died`` when it could not say."""
    state = runtime.read_state()
    if not state:
        return None
    if state.get("state") == "ended":
        return state
    return {**state, "state": "died", "processes": [describe(process) for process in find_leftovers(runtime)]}


def _page(body: dict[str, Any]) -> str:
    # One that answers shows its stages; one that has none yet, or none between two boots, says what it waits for.
    if body["state"] in WAITS and "stages" not in body:
        head = f"{body['name']}: waiting for {WAITS[body['state']]} (supervisor pid {body['pid']})"
        return "\n".join([head, *(body["findings"] or [])])
    if body["state"] != "stopped":
        return render_status(body)
    match body["last_run"]:
        case None:
            return f"{body['name']}: not running, no run recorded here; give its config file if it sets runtime_dir"
        case {"state": "died", "pid": pid, "processes": processes}:
            head = f"{body['name']}: not running; its last supervisor (pid {pid}) died without cleaning up"
            return "\n".join([head, *(f"still there: {process}" for process in processes)])
        case {"first_failure": {"stage": stage, "phase": phase, "text": text}, "exit_code": code}:
            where = f"stage {stage} in phase {phase}: " if stage else ""
            said = next(iter(str(text).splitlines()), "")
            return f"{body['name']}: not running; the last run failed (exit {code}): {where}{said}"
        case last:
            why = next(iter(str(last.get("reason") or "").splitlines()), "")
            code = last.get("exit_code")
            return f"{body['name']}: not running; the last run ended with exit code {code}{why and f': {why}'}"
