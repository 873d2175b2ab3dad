"""The ``stagelaunch`` command: finds the subcommand, runs it, and turns every end into a documented exit code.

A subcommand's module is imported only when it is used, so that ``stagelaunch plan`` does not pay for the supervisor.
A subcommand returns an ``ExitCode``, or None for success, or raises a ``StagelaunchError``.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import click

from stagelaunch.cli.streams import discard, open_standard_streams
from stagelaunch.core.errors import ExitCode, StagelaunchError


@dataclass(frozen=True)
class Entry:
    """Where a subcommand lives, and its line in ``--help``."""

    target: str
    """``module:function``."""
    help: str


COMMANDS: dict[str, Entry] = {
    "plan": Entry("stagelaunch.cli.plan:plan", "Show what a deployment needs and whether it fits; touches nothing."),
    "up": Entry("stagelaunch.cli.up:up", "Boot every stage of a deployment, or none."),
    "status": Entry("stagelaunch.cli.status:status", "Show a running deployment: phases, ledgers, devices."),
    "probe": Entry("stagelaunch.cli.probe:probe", "Run one step through a ready stage and compare it."),
    "logs": Entry("stagelaunch.cli.logs:logs", "Show what the stages have written, and follow it."),
    "events": Entry("stagelaunch.cli.events:events", "Print what has happened and happens, one JSON object a line."),
    "report": Entry(
        "stagelaunch.cli.report:report", "Show when each stage did what in its boot, and what it waited for."
    ),
    "wait": Entry("stagelaunch.cli.wait:wait", "Wait until a deployment is ready, or has stopped."),
    "restart": Entry("stagelaunch.cli.restart:restart", "Start one stage of a running deployment again."),
    "down": Entry("stagelaunch.cli.down:down", "Stop a running deployment and wait until it is gone."),
    "smoke": Entry("stagelaunch.cli.smoke:smoke", "Boot, probe, stop and look for leftovers, as a test for CI."),
    "systemd": Entry("stagelaunch.cli.systemd:systemd", "Print a systemd unit that runs a deployment."),
    "doctor": Entry("stagelaunch.cli.doctor:doctor", "Check devices, driver, lock directory and leftovers."),
    "schema": Entry("stagelaunch.cli.schema:schema", "Print the JSON Schema of deployment files."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None for a name that is none."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, function = entry.target.partition(":")
        command = getattr(importlib.import_module(module), function)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in ``--help``, from the table: asking for help imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        # Imported here: it takes as long as the rest of this module, and the other commands have no use for it.
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("stagelaunch")
        except PackageNotFoundError:
            number = "(not installed)"
        click.echo(f"stagelaunch {number}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show it.")
def cli() -> None:
    """Boot every stage of a multi-stage model on shared GPUs: all of them, or none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code of the process. Never raises but for a second Ctrl-C."""
    open_standard_streams()
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        discard(sys.stdout)
        return ExitCode.OK
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return ExitCode.INTERRUPTED
    except StagelaunchError as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            return _internal_error()
        discard(sys.stdout)
        _say(f"cannot write the output: {error.strerror}")
        return ExitCode.TEMPORARY
    except Exception:
        return _internal_error()


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""What a write to a full or broken stdout ends with."""


def _internal_error() -> int:
    # With its traceback always: it is our bug, and the report needs it.
    traceback.print_exc()
    _say("internal error: this is a bug in stagelaunch; please report it with the lines above and your config file")
    return ExitCode.INTERNAL


def _run(argv: Sequence[str]) -> int:
    """Not click's own ``main``: it exits with 2 for wrong usage and 1 for a broken pipe, which mean other things."""
    try:
        with cli.make_context("stagelaunch", list(argv)) as context:
            result = cli.invoke(context)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return ExitCode.USAGE
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except click.exceptions.Exit as error:
        return error.exit_code
    return ExitCode.OK if result is None else int(result)


def _say(text: str) -> None:
    """On stderr, every line marked as ours; the exit code has to do where nobody can read it."""
    with contextlib.suppress(OSError):
        for line in text.splitlines():
            click.echo(f"stagelaunch: {line}", err=True)
