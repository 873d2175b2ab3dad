"""``stagelaunch wait``: until a deployment is ready, or has stopped. Also one that still waits for its admission."""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path
from typing import Any

import click

from stagelaunch.cli.target import find_target
from stagelaunch.cli.up import parse_wait
from stagelaunch.core.errors import ControlError, ExitCode, NotRunningError
from stagelaunch.core.units import format_duration
from stagelaunch.supervisor.client import exchange
from stagelaunch.supervisor.runtime import Runtime

POLL_S = 0.2
ANSWER_S = 5.0


@click.command()
@click.argument("target")
@click.option("--for", "state", type=click.Choice(["ready", "stopped"]), required=True, help="What to wait for.")
@click.option("--timeout", "timeout_text", metavar="DURATION", default="10m", show_default=True, help="How long.")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where deployments keep their sockets.")
def wait(target: str, state: str, timeout_text: str, runtime_dir: Path | None) -> int:
    """Wait until the deployment TARGET is ready, or has stopped; exit 0 then, and 75 after the timeout.

    If it fails or ends instead of becoming ready, or is not running: its own exit code (1 in place of 0), and what
    failed first.
    """
    runtime = find_target(target, runtime_dir).runtime
    timeout_s = parse_wait(timeout_text, "--timeout")
    return wait_until(runtime, state, timeout_s)


def wait_until(runtime: Runtime, state: str, timeout_s: float) -> int:
    """The exit code of a wait; says why where it is not 0."""
    deadline_s = time.monotonic() + timeout_s
    body = _health(runtime)
    owner = _open_supervisor(runtime, body)
    try:
        while True:
            if state == "ready" and body is not None and body["ready"]:
                return ExitCode.OK
            left_s = deadline_s - time.monotonic()
            if owner is None or select.select([owner], [], [], max(0.0, min(POLL_S, left_s)))[0]:
                return ExitCode.OK if state == "stopped" else _ended(runtime, is_over=owner is None)
            if left_s <= 0:
                took = format_duration(timeout_s)
                _say(f"{runtime.directory.name} is not {state} after {took}: {_where(runtime, body)}")
                return ExitCode.TEMPORARY
            body = _health(runtime) or body
    finally:
        if owner is not None:
            os.close(owner)


def _open_supervisor(runtime: Runtime, body: dict[str, Any] | None) -> int | None:
    owner = runtime.owner_pidfd()
    if owner is None and body is not None:
        # Its state file may have been deleted; the supervisor itself knows who it is.
        with contextlib.suppress(ProcessLookupError):
            owner = os.pidfd_open(body["pid"])
    return owner


def _health(runtime: Runtime) -> dict[str, Any] | None:
    """How far it is; None while nothing answers."""
    try:
        body = exchange(runtime, "GET", "/v1/health", ANSWER_S)[1]
    except (NotRunningError, ControlError):
        return None
    return body if "stages" in body else None


def _where(runtime: Runtime, body: dict[str, Any] | None) -> str:
    """Who is waited for: each stage that is not there yet, with its phase."""
    if (what := runtime.waits_for) is not None:
        return f"it waits for {what} (supervisor pid {runtime.live_pid()})"
    if body is None:
        return f"its supervisor (pid {runtime.owner_pid()}) does not answer"
    late = [stage for stage in body["stages"] if stage["phase"] != "ready"] or body["stages"]
    return f"{body['state']}; " + ", ".join(
        f"{stage['name']} in phase {stage['phase']} for {format_duration(stage['phase_elapsed_s'])}"
        if stage["phase"]
        else f"{stage['name']} not started"
        for stage in late
    )


def _ended(runtime: Runtime, *, is_over: bool) -> int:
    """It ended before it was ready: what it said about that, and its exit code. ``is_over``: before anybody waited."""
    name, ending = runtime.directory.name, runtime.read_state()
    if not ending:
        raise NotRunningError(f"cannot wait for deployment {name}: it is not running, and no run is recorded here")
    code = ending.get("exit_code")
    if ending.get("state") != "ended" or not isinstance(code, int):
        _say(f"{name} is gone, but was killed before it could say how it ended; see: stagelaunch doctor")
        return ExitCode.INTERNAL
    what = "is not running; its last run ended" if is_over else "has ended"
    _say(f"{name} {what} (exit {code}){_first_failure(ending)}")
    # Whatever it was, it is not ready.
    return code or ExitCode.STAGE_FAILED


def _first_failure(ending: dict[str, Any]) -> str:
    match ending.get("first_failure"):
        case {"stage": stage, "phase": phase, "text": text}:
            where = f"stage {stage} failed in phase {phase}: " if stage else ""
            return f": {where}{next(iter(str(text).splitlines()), '')}"
        case _:
            why = next(iter(str(ending.get("reason") or "").splitlines()), "")
            return why and f": {why}"


def _say(text: str) -> None:
    click.echo(f"stagelaunch: {text}", err=True)
