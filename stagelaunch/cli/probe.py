"""``stagelaunch probe``: one step through each ready stage, the graph against eager."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import click

from stagelaunch.cli.pages import render_probes
from stagelaunch.cli.target import find_target
from stagelaunch.core.errors import ExitCode
from stagelaunch.supervisor.client import request

PROBE_TIMEOUT_S = 300.0
"""Stages are probed one after another; each has its own deadline in the supervisor."""


@click.command()
@click.argument("target")
@click.argument("stages", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where deployments keep their sockets.")
def probe(target: str, stages: tuple[str, ...], as_json: bool, runtime_dir: Path | None) -> int:
    """Run one step through STAGES of deployment TARGET (all of them if none is named).

    Exit 0 when every graph gives exactly what eager gives, 1 otherwise.
    """
    query = "&".join(f"stage={quote(name)}" for name in stages)
    body = request(find_target(target, runtime_dir).runtime, "POST", f"/v1/probe?{query}", PROBE_TIMEOUT_S)
    if "results" not in body:
        click.echo(f"stagelaunch: cannot probe {target}: {body['error']}", err=True)
        return ExitCode.STAGE_FAILED
    results = body["results"]
    click.echo(json.dumps(results, indent=2) if as_json else render_probes(results))
    good = all(not result.get("error") and result["max_abs_diff"] == 0 for result in results)
    return ExitCode.OK if good else ExitCode.STAGE_FAILED
