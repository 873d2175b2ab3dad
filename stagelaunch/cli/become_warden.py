"""How ``stagelaunch up`` becomes its own warden: in place, so that whoever started it keeps its pid.

The warden starts the supervisor, which is ``stagelaunch up --warden PID`` with the same arguments.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import click

import stagelaunch
from stagelaunch.supervisor.notify import VARIABLES, read_link
from stagelaunch.warden import PASSED_ON

_PACKAGE = Path(stagelaunch.__file__).resolve().parent


def become_warden(arguments: list[str]) -> NoReturn:
    """Replace this process by the warden, whose supervisor is ``up`` with these arguments. OSError where that fails."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    words = [*_interpreter(), "stagelaunch", "up", "--", *for_supervisor(os.environ, os.getpid()), *arguments]
    command = [sys.executable, "-I", "-S", str(_PACKAGE / "warden.py"), *words]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # From here on a signal waits for the warden, which takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    os.execve(sys.executable, command, environment)


def same_arguments(context: click.Context) -> list[str]:
    """The command line of the current command, as it was understood."""
    options, others = [], []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if not isinstance(parameter, click.Option):
            others.append(str(value))
        elif value is True:
            options.append(parameter.opts[0])
        elif value is not None and value is not False:
            options += [parameter.opts[0], str(value)]
    return [*options, "--", *others]


def for_supervisor(environment: Mapping[str, str], pid: int) -> list[str]:
    """What the service manager tells the process with this pid, as options of ``up``."""
    link = read_link(environment, pid)
    options = [] if link.address is None else ["--notify-socket", link.address]
    if link.watchdog_s is not None:
        options += ["--watchdog-usec", str(round(link.watchdog_s * 1e6))]
    return options


def _interpreter() -> list[str]:
    """Python, so that it finds this very package and nothing in the current directory that it did not find before."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    from_here = spec is not None or _PACKAGE.parent == Path.cwd()
    return [sys.executable, *([] if from_here else ["-P"]), "-m"]
