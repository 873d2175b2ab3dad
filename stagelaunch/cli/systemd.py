"""``stagelaunch systemd``: the unit that runs a deployment as a service."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from stagelaunch.config_file import LoadedDeployment, load_deployment
from stagelaunch.core.errors import UsageError
from stagelaunch.core.unit_file import Service, unit_name, unit_text

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}|[1-9][0-9]{0,9}")


@click.command()
@click.argument("config")
@click.option("--user", metavar="NAME", help="Whose processes they are; left out: root.")
@click.option("--unit-name", "only_name", is_flag=True, help="Print the name of the unit's file instead.")
def systemd(config: str, user: str | None, only_name: bool) -> None:
    """Print a systemd unit that runs the deployment in CONFIG.

    Save it as the file that --unit-name prints, in /etc/systemd/system.
    """
    loaded = load_deployment(config)
    if user is not None and not _USER.fullmatch(user):
        raise UsageError(f"cannot make a unit for user {user!r}: that is no name of a user; give one, or leave it out")
    if only_name:
        click.echo(unit_name(loaded.deployment.name))
        return
    try:
        click.echo(unit_text(_service(loaded, user)), nl=False)
    except ValueError as error:
        raise UsageError(f"cannot make a unit for {config}: {error}; move it to another path") from None


def _service(loaded: LoadedDeployment, user: str | None) -> Service:
    command = [sys.executable, "-m", "stagelaunch", "up"]
    below_run = None
    if loaded.runtime_dir is None:
        below_run = "stagelaunch"
        if user not in (None, "root"):
            # A user's own runtime directory exists only while they are logged in.
            below_run = f"stagelaunch-{user}"
            command += ["--runtime-dir", str(Path("/run") / below_run)]
    command += ["--", str(loaded.path)]
    mounts = tuple(map(str, (loaded.path, loaded.model_dir, loaded.lock_dir)))
    return Service(loaded.deployment.name, tuple(command), loaded.deployment.timeouts, mounts, user, below_run)
