"""``stagelaunch up``: boot a deployment and stay with it, or leave it to a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from stagelaunch.cli.background import start_in_background
from stagelaunch.cli.become_warden import become_warden, same_arguments
from stagelaunch.cli.machine import simulated_machine
from stagelaunch.cli.pages import render_status
from stagelaunch.cli.streams import discard, is_file, reopen_output, takes_more
from stagelaunch.cli.target import Target, find_target
from stagelaunch.core import failure
from stagelaunch.core.errors import ExitCode, StagelaunchError, UsageError
from stagelaunch.core.outcome import Outcome
from stagelaunch.core.run_options import RunOptions, ServiceLink
from stagelaunch.core.units import format_duration, parse_duration
from stagelaunch.supervisor.own_run import OwnRun
from stagelaunch.system.log_file import tail
from stagelaunch.system.process import die_with_parent

if TYPE_CHECKING:
    from stagelaunch.supervisor.run import Listener

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
@click.option("--quiet", is_flag=True, help="Do not show what the stages write to their logs.")
@click.option("--ci", is_flag=True, help="A stop takes at most 4 s in all, for runners that kill what is left.")
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where sockets and logs go.")
@click.option("--notify-fd", type=int, hidden=True, help="Tell progress to this descriptor, one JSON object a line.")
@click.option("--warden", type=int, hidden=True, help="Be the supervisor under this parent.")
@click.option("--run-id", hidden=True, help="Given by the warden: the id of this run.")
@click.option("--cgroup", type=click.Path(path_type=Path), hidden=True, help="Given by the warden: the run's cgroup.")
@click.option("--notify-socket", hidden=True, help="Where the service manager listens.")
@click.option(
    "--watchdog-usec",
    type=click.IntRange(min=1),
    hidden=True,
    help="How often the service manager wants a sign of life.",
)
@click.pass_context
def up(
    context: click.Context,
    config: str,
    detach: bool,
    wait: bool,
    wait_text: str | None,
    quiet: bool,
    ci: bool,
    runtime_dir: Path | None,
    notify_fd: int | None,
    warden: int | None,
    run_id: str | None,
    cgroup: Path | None,
    notify_socket: str | None,
    watchdog_usec: int | None,
) -> int:
    """Boot every stage of the deployment in CONFIG, or none.

    In the foreground it stays until Ctrl-C, `stagelaunch down` or the end of a stage.
    """
    if wait and not detach:
        raise UsageError("--wait goes with --detach: in the foreground `up` stays until the end anyway")
    wait_s = None if wait_text is None else parse_wait(wait_text)
    target = find_target(config, runtime_dir)
    if target.loaded is None:
        raise UsageError(f"{config!r} is not a config file; `up` takes the path of a *.yaml or *.json file")
    if detach:
        return _detach(config, target, runtime_dir, wait, wait_text, ci)
    if warden is None:
        become_warden(same_arguments(context))
    die_with_parent(warden)
    link = ServiceLink(notify_socket, None if watchdog_usec is None else watchdog_usec / 1e6)
    if run_id is not None:
        target = replace(target, runtime=replace(target.runtime, run=OwnRun.under(warden, run_id, cgroup)))
    code = _foreground(
        target, None if notify_fd is None else os.fdopen(notify_fd, "w"), RunOptions(wait_s, ci, quiet, link)
    )
    # Not through the interpreter's exit: it would wait for children that could not be killed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def parse_wait(text: str, option: str = "--wait-for-memory") -> float:
    """Seconds of an option that says how long to wait. UsageError for what is no duration, or no end in sight."""
    try:
        wait_s = parse_duration(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"cannot read {option} {text!r}: {error}; write 60s, or 5m") from None
    if wait_s > _LONGEST_WAIT_S:
        raise UsageError(f"cannot read {option} {text!r}: longer than a year; write 60s, or 5m")
    return wait_s


def _foreground(target: Target, notify: IO[str] | None, options: RunOptions) -> int:
    # Here only: its imports take as long as all others together, and the process that becomes the warden has no use
    # for them.
    from stagelaunch.supervisor.run import run_deployment

    loaded = target.loaded
    assert loaded is not None
    own_log = target.runtime.supervisor_log if is_file(2, target.runtime.supervisor_log) else None
    voice = _Voice(notify, own_log, shows_stages=not options.quiet and own_log is None)
    # From a log rotation that comes too early or too late for the loop: nothing to be killed by.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if own_log is not None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        voice.print(f"---- {now} supervisor pid {os.getpid()}, config {loaded.path} ----", err=True)
    try:
        machine = simulated_machine(loaded)
        outcome = asyncio.run(run_deployment(loaded, machine, target.runtime, voice.listener(), options))
    except StagelaunchError as error:
        voice.ended(error.exit_code, str(error))
        raise
    except (KeyboardInterrupt, asyncio.CancelledError):
        voice.ended(ExitCode.INTERRUPTED, "interrupted before any stage was started")
        raise KeyboardInterrupt from None
    text = _ending(target.name, outcome)
    for line in text.splitlines():
        voice.print(f"stagelaunch: {line}", err=True)
    voice.ended(outcome.exit_code, text)
    return outcome.exit_code


def _ending(name: str, outcome: Outcome) -> str:
    """The last words: the first failure with its evidence, what is left, and the state everything is in."""
    lines = [] if outcome.first is None else [failure.render(outcome.first, outcome.consequences)]
    lines += [f"LEFT BEHIND: {text}" for text in outcome.leftovers]
    state = "clean-up incomplete" if outcome.leftovers else "every stage is gone, device memory is back"
    lines.append(f"{name} stopped: {state} (exit {int(outcome.exit_code)})")
    return "\n".join(lines)


class _Voice:
    """Tells people (stderr), the page (stdout) and, when detached, whoever waits (a descriptor)."""

    def __init__(self, notify: IO[str] | None, own_log: Path | None, *, shows_stages: bool) -> None:
        self._notify = notify
        self._own_log = own_log
        self._shows_stages = shows_stages
        self._lost: set[bool] = set()
        """Streams that could not be written: True for stderr, False for stdout."""
        self._began_s = time.monotonic()

    def listener(self) -> Listener:
        """What the deployment tells."""
        from stagelaunch.supervisor.run import Listener

        show = self._show if self._shows_stages else None
        return Listener(self._say, lambda: self._tell(started=True), self._ready, show, self._reopen)

    def ended(self, code: int, text: str) -> None:
        """The last thing said."""
        self._tell(exit=int(code), text=text)

    def print(self, text: str, *, err: bool = False) -> None:
        """Print, or give the stream up: a closed pipe or a full disk costs the words, never the deployment."""
        if err in self._lost:
            return
        try:
            click.echo(text, err=err)
            # Whoever reads a pipe wants it now, not when the deployment ends.
            (sys.stderr if err else sys.stdout).flush()
        except OSError:
            self._lost.add(err)
            discard(sys.stderr if err else sys.stdout)

    def _say(self, text: str) -> None:
        line = f"[{format_duration(time.monotonic() - self._began_s):>7}] {text}"
        self.print(line, err=True)
        self._tell(line=line)

    def _show(self, line: str) -> bool:
        """A stage's line is worth no wait for a terminal or a pipe that takes nothing; False: try again later."""
        if True not in self._lost and not takes_more(sys.stderr):
            return False
        self.print(line, err=True)
        return True

    def _reopen(self) -> None:
        if self._own_log is not None:
            with contextlib.suppress(OSError):
                reopen_output(self._own_log)

    def _ready(self, body: dict[str, Any]) -> None:
        self.print(render_status(body))
        self._tell(ready=body)
        self._close()

    def _tell(self, **event: Any) -> None:
        if self._notify is None:
            return
        try:
            self._notify.write(json.dumps(event) + "\n")
            self._notify.flush()
        except OSError:
            self._close()

    def _close(self) -> None:
        if self._notify is not None:
            with contextlib.suppress(OSError):
                self._notify.close()
            self._notify = None


def _detach(config: str, target: Target, runtime_dir: Path | None, wait: bool, wait_text: str | None, ci: bool) -> int:
    options = [] if wait_text is None else ["--wait-for-memory", wait_text]
    if ci:
        options.append("--ci")
    child, read_fd = start_in_background(target.runtime, config, runtime_dir, options)
    log_path = target.runtime.supervisor_log
    # Whoever ends the waiting process means the boot: SIGTERM is taken like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
                    f"{target.name} is booting; follow it with: stagelaunch status {target.runtime.argument}", err=True
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
