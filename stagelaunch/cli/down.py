"""``stagelaunch down``: stop a deployment and wait until it is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import click

from stagelaunch.cli.target import find_target
from stagelaunch.core.errors import ExitCode, NotRunningError
from stagelaunch.supervisor.client import request
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.system.tree import wait_for_ends


@click.command()
@click.argument("target")
@click.option("--now", is_flag=True, help="Kill the stages instead of asking them first.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the end.",
)
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where deployments keep their sockets.")
def down(target: str, now: bool, timeout_s: float, runtime_dir: Path | None) -> int:
    """Stop the deployment TARGET (its name or config file). Exit 0, or 71 if something is left.

    One that still waits for its admission or for device memory gives up.
    """
    runtime = find_target(target, runtime_dir).runtime
    name = runtime.directory.name
    try:
        pidfd = _open_supervisor(runtime)
        # The warden ends last: only then is nothing left of the run.
        pidfds = tuple(fd for fd in (pidfd, runtime.warden_pidfd()) if fd is not None)
        if runtime.waits_for is not None and runtime.is_owned():
            # Nothing answers yet. Should it be admitted this instant, the signal stops it in good order.
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        else:
            request(runtime, "POST", f"/v1/down?now={int(now)}")
    except NotRunningError as error:
        click.echo(f"stagelaunch: {error}", err=True)
        return error.exit_code
    if not _wait(pidfds, timeout_s):
        click.echo(
            f"stagelaunch: {name} is still stopping after {timeout_s:g}s; see: stagelaunch status {runtime.argument}",
            err=True,
        )
        return ExitCode.CLEANUP_INCOMPLETE
    return _report(runtime)


def _report(runtime: Runtime) -> int:
    """What the supervisor wrote down about its end; one that could not write has not looked for leftovers."""
    name = runtime.directory.name
    ending = runtime.read_state()
    if ending.get("state") != "ended" or ending.get("exit_code") is None:
        click.echo(
            f"stagelaunch: {name} is gone, but died before it could check its clean-up; see: nvidia-smi", err=True
        )
        return ExitCode.CLEANUP_INCOMPLETE
    leftovers = ending.get("leftovers", [])
    for text in leftovers:
        click.echo(f"stagelaunch: LEFT BEHIND: {text}", err=True)
    if leftovers:
        return ExitCode.CLEANUP_INCOMPLETE
    click.echo(f"{name} is down; device memory is back")
    return ExitCode.OK


def _open_supervisor(runtime: Runtime) -> int:
    """A pidfd of the live supervisor: unlike its pid, it cannot come to mean another process."""
    name = runtime.directory.name
    # Its state file may have been deleted; the supervisor itself knows who it is.
    recorded = runtime.live_pid()
    pid = recorded or int(request(runtime, "GET", "/v1/status")["pid"])
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise NotRunningError(f"cannot stop deployment {name}: it is not running") from None
    # Looked at again: between the look and the opening the number may have gone to another process.
    if recorded is not None and runtime.live_pid() != recorded:
        os.close(pidfd)
        raise NotRunningError(f"cannot stop deployment {name}: it has just ended")
    return pidfd


def _wait(pidfds: tuple[int, ...], timeout_s: float) -> bool:
    """Whether these processes ended in time."""
    try:
        return wait_for_ends(pidfds, time.monotonic() + timeout_s)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
