"""``stagelaunch up --detach``: the deployment in a process of its own, listened to until it says enough."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import IO

import click

from stagelaunch.cli.background import start_in_background
from stagelaunch.cli.pages import render_status
from stagelaunch.cli.target import Target
from stagelaunch.core.errors import ExitCode
from stagelaunch.system.log_file import tail


def detach(
    config: str,
    target: Target,
    runtime_dir: Path | None,
    wait: bool,
    wait_text: str | None,
    ci: bool,
    reuse_plan: bool,
) -> int:
    """Start it in a process of its own; repeat what that tells until it boots, is ready (``wait``) or has failed."""
    options = [] if wait_text is None else ["--wait-for-memory", wait_text]
    options += [option for option, given in (("--ci", ci), ("--reuse-plan", reuse_plan)) if given]
    child, read_fd = start_in_background(target.runtime, config, runtime_dir, options)
    log_path = target.runtime.supervisor_log
    # Whoever ends the waiting process means the boot: SIGTERM is taken like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with os.fdopen(read_fd) as events:
        try:
            return _follow(events, wait, target, log_path)
        except KeyboardInterrupt:
            # Whoever waits for the boot owns it: a Ctrl-C here is one there.
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGINT)
            child.wait()
            raise


def _follow(events: IO[str], wait: bool, target: Target, log_path: Path) -> int:
    """Repeat what the detached process tells until it says enough."""
    for event in map(json.loads, events):
        match event:
            case {"line": line}:
                click.echo(line, err=True)
            case {"started": True} if not wait:
                click.echo(
                    f"{target.name} is booting; follow it with: stagelaunch status {target.runtime.argument}; "
                    f"what it says goes to {log_path}",
                    err=True,
                )
                return ExitCode.OK
            case {"ready": body}:
                click.echo(render_status(body))
                return ExitCode.OK
            case {"exit": code, "text": text}:
                for line in text.splitlines():
                    click.echo(f"stagelaunch: {line}", err=True)
                return int(code)
    for line in tail(log_path, 20):
        click.echo(line, err=True)
    click.echo(f"stagelaunch: the supervisor of {target.name} died; see {log_path}", err=True)
    return ExitCode.INTERNAL
