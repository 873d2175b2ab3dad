"""``stagelaunch up``: boot a deployment and stay with it, or leave it to a process of its own.

In the foreground the command becomes its own warden (``become_warden``), and a child of it the supervisor.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stagelaunch.cli.become_warden import become_warden
from stagelaunch.core.errors import UsageError
from stagelaunch.core.run_options import RunOptions
from stagelaunch.core.units import parse_duration
from stagelaunch.supervisor import forkserver_process
from stagelaunch.supervisor.notify import read_link

if TYPE_CHECKING:
    from stagelaunch.cli.target import Target

_LONGEST_WAIT_S = 366 * 86400.0


@click.command()
@click.argument("config")
@click.option("--detach", is_flag=True, help="Leave the deployment to a process of its own and return.")
@click.option("--wait", is_flag=True, help="With --detach: return when every stage is ready, or the boot has failed.")
@click.option(
    "--wait-for-memory",
    "wait_text",
    metavar="DURATION",
    help="If it does not fit beside what others hold or have claimed, wait so long (60s, 5m) for it to fit.",
)
@click.option("--reuse-plan", is_flag=True, help="Do not measure again what an earlier boot of this plan has measured.")
@click.option("--quiet", is_flag=True, help="Do not show what the stages write to their logs.")
@click.option("--ci", is_flag=True, help="A stop takes at most 4 s in all, for runners that kill what is left.")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where sockets and logs go.")
@click.option("--notify-fd", type=int, hidden=True, help="Tell progress to this descriptor, one JSON object a line.")
def up(
    config: str,
    detach: bool,
    wait: bool,
    wait_text: str | None,
    reuse_plan: bool,
    quiet: bool,
    ci: bool,
    runtime_dir: Path | None,
    notify_fd: int | None,
) -> int:
    """Boot every stage of the deployment in CONFIG, or none.

    In the foreground it stays until Ctrl-C, `stagelaunch down` or the end of a stage.
    """
    if wait and not detach:
        raise UsageError("--wait goes with --detach: in the foreground `up` stays until the end anyway")
    wait_s = None if wait_text is None else parse_wait(wait_text)
    if detach:
        from stagelaunch.cli.detach import detach as start_detached

        return start_detached(config, _target(config, runtime_dir), runtime_dir, wait, wait_text, ci, reuse_plan)
    link = read_link(os.environ, os.getpid())
    own = become_warden(config)
    # From here on this is the supervisor. What stages need is imported while it imports what it needs itself.
    forkserver_process.prepare()
    try:
        target = _target(config, runtime_dir)
        from stagelaunch.cli.foreground import run_foreground
        from stagelaunch.supervisor.own_run import OwnRun, end_with_warden

        end_with_warden(own)
        target = replace(target, runtime=replace(target.runtime, run=OwnRun.under(own)))
        notify = None if notify_fd is None else os.fdopen(notify_fd, "w")
        code = run_foreground(target, notify, RunOptions(wait_s, ci, quiet, link, reuse_plan))
    finally:
        forkserver_process.discard()
    # A warden that was stopped (Ctrl-Z) could not see our end.
    os.kill(own.warden, signal.SIGCONT)
    # Not through the interpreter's exit: it would wait for children that could not be killed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _target(config: str, runtime_dir: Path | None) -> Target:
    # Imported now: what the supervisor imports takes as long as all else, and the warden has no use for it.
    from stagelaunch.cli.target import find_target

    target = find_target(config, runtime_dir)
    if target.loaded is None:
        raise UsageError(f"{config!r} is not a config file; `up` takes the path of a *.yaml or *.json file")
    return target


def parse_wait(text: str, option: str = "--wait-for-memory") -> float:
    """Seconds of an option that says how long to wait. UsageError for what is no duration, or no end in sight."""
    try:
        wait_s = parse_duration(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"cannot read {option} {text!r}: {error}; write 60s, or 5m") from None
    if wait_s > _LONGEST_WAIT_S:
        raise UsageError(f"cannot read {option} {text!r}: longer than a year; write 60s, or 5m")
    return wait_s
