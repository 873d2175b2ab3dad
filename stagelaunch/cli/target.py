"""Which deployment a command means: a config file, or the name of one that runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stagelaunch.config_file import LoadedDeployment, load_deployment
from stagelaunch.core.config_fields import is_slug
from stagelaunch.core.errors import UsageError
from stagelaunch.supervisor.runtime import Runtime

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Target:
    """A deployment by name, with its runtime; ``loaded`` when it was given as a config file."""

    name: str
    runtime: Runtime
    loaded: LoadedDeployment | None


def find_target(given: str, runtime_dir: Path | None) -> Target:
    """A path that looks like a config file is read; anything else is the name of a deployment."""
    if given.endswith(CONFIG_SUFFIXES):
        loaded = load_deployment(given)
        return Target(loaded.deployment.name, runtime_of(loaded, runtime_dir), loaded)
    if not is_slug(given):
        raise UsageError(f"{given!r} is neither a config file (*.yaml, *.json) nor the name of a deployment")
    return Target(given, Runtime.of(given, runtime_dir), None)


def runtime_of(loaded: LoadedDeployment, runtime_dir: Path | None) -> Runtime:
    """Where the deployment keeps its files: the command line's word, then the config's, then the default."""
    return Runtime.of(loaded.deployment.name, runtime_dir or loaded.runtime_dir)
