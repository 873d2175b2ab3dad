"""How ``stagelaunch up`` becomes its own warden, in place, while a child of it goes on as the supervisor."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import stagelaunch
from stagelaunch import warden
from stagelaunch.core.errors import StartError
from stagelaunch.supervisor.notify import VARIABLES

_BEGUN = "STAGELAUNCH_BEGUN"
"""From a supervisor to itself when it starts afresh: the run that has begun."""
_PACKAGE = Path(stagelaunch.__file__).resolve().parent


def become_warden(config: str) -> warden.Run:
    """Divide this process. Returns in the supervisor only, which has all signals blocked that the warden passes on.

    A supervisor that has other threads to fear begins anew, by the same command line, and comes here a second time.
    StartError where the process cannot be divided.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # What a service manager told is this process's, and for no child of it.
    told = {name: text for name in VARIABLES if (text := os.environ.pop(name, None)) is not None}
    begun = _begun()
    if begun is not None:
        _forget_script_directory()
        return begun
    has_threads = _has_threads()
    try:
        run = warden.begin()
        supervisor = warden.fork(run)
    except OSError as error:
        text = "try again, or raise this user's limit of processes (ulimit -u)"
        raise StartError(f"cannot start the supervisor: {error.strerror}; {text}") from error
    if supervisor == 0:
        if has_threads:
            _begin_anew(run, told)
        _forget_script_directory()
        return run
    command = warden.command(run, supervisor, config)
    try:
        os.execv(command[0], command)
    except OSError:
        # The interpreter is gone, or there is no memory: larger than it need be, it does the same.
        os._exit(warden.main(command[command.index(warden.__file__) + 1 :]))


def _forget_script_directory() -> None:
    """Stages are given our ``sys.path``: what happens to lie beside the ``stagelaunch`` script is not for them."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or sys.flags.safe_path or file is None:
        return
    directory = Path(file).resolve().parent
    if sys.path[:1] == [str(directory)] and directory != _PACKAGE.parent:
        del sys.path[0]


def _has_threads() -> bool:
    """Whether somebody, a ``sitecustomize`` for one, has started threads. A fork copies none of them, but the locks
    they hold, those of modules they import among them."""
    try:
        return len(os.listdir("/proc/self/task")) > 1
    except OSError:
        return False


def _begin_anew(run: warden.Run, told: Mapping[str, str]) -> None:
    """Start this process afresh, in place. Returns where that cannot be: to go on is the better chance."""
    body = json.dumps([run.warden, run.run_id, None if run.cgroup is None else str(run.cgroup), run.has_terminal])
    environment = {**os.environ, **told, _BEGUN: body}
    if told.get("WATCHDOG_PID") == str(run.warden):
        environment["WATCHDOG_PID"] = str(os.getpid())
    with suppress(OSError):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _begun() -> warden.Run | None:
    """The run whose supervisor this process is, started afresh."""
    body = os.environ.pop(_BEGUN, None)
    if body is None:
        return None
    parent, run_id, directory, has_terminal = json.loads(body)
    return warden.Run(parent, run_id, None if directory is None else Path(directory), has_terminal)
