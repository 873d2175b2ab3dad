"""How ``stagelaunch up`` becomes its own warden, in place, while a child of it goes on as the supervisor."""

from __future__ import annotations

import os
import sys

from stagelaunch import warden
from stagelaunch.supervisor.notify import VARIABLES


def become_warden(config: str) -> warden.Run:
    """Divide this process. Returns in the supervisor only, which has all signals blocked that the warden passes on.

    OSError where that is not possible.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # What a service manager told is this process's, and for no child of it.
    for name in VARIABLES:
        os.environ.pop(name, None)
    run = warden.begin()
    supervisor = warden.fork(run)
    if supervisor == 0:
        return run
    command = warden.command(run, supervisor, config)
    try:
        os.execv(command[0], command)
    except OSError:
        # The interpreter is gone, or there is no memory: larger than it need be, it does the same.
        os._exit(warden.main(command[command.index(warden.__file__) + 1 :]))
