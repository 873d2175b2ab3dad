"""Reading a deployment's file again while it runs."""

from __future__ import annotations

from pathlib import Path

from stagelaunch.config_file import load_deployment
from stagelaunch.core.config import Deployment
from stagelaunch.core.errors import ConfigError
from stagelaunch.core.reload import Reloaded, reload


def reload_file(path: Path, running: Deployment) -> Reloaded:
    """What ``core.reload`` makes of the file as it is now. One that is wrong changes nothing, and its faults are said.

    ``running``: as it was read, devices as written.
    """
    try:
        return reload(running, load_deployment(path).deployment)
    except ConfigError as error:
        faults = str(error).splitlines()
        return Reloaded(running, (f"cannot reload {path}: it is wrong, and nothing was changed; correct it:", *faults))
