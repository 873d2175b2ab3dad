"""Which deployment a command means: a config file, or the name of one that runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagelaunch.config_file import LoadedDeployment, load_deployment
from stagelaunch.core.config_fields import is_slug
from stagelaunch.core.errors import UsageError
from stagelaunch.supervisor.runtime import Runtime, list_runtimes
from stagelaunch.system.regular import read_regular

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


def find_stages(words: Sequence[str], runtime_dir: Path | None) -> tuple[Target, tuple[str, ...]]:
    """The deployment and the stages that ``[TARGET] [STAGE...]`` means; no stages where none is named.

    The first word is the deployment if one of that name has a runtime, or it is a config file. Otherwise all words are
    stages, of the one deployment here that runs and has a log of each, else of the one that did. UsageError where there
    are several, or none.
    """
    if not words:
        raise UsageError("name a deployment or a stage")
    first, *rest = words
    if first.endswith(CONFIG_SUFFIXES) or Runtime.of(first, runtime_dir).directory.is_dir():
        target = find_target(first, runtime_dir)
        return target, _known(target, rest)
    known = {runtime.directory.name: stage_names(runtime) for runtime in list_runtimes(runtime_dir)}
    having = [name for name, stages in known.items() if set(words) <= set(stages)]
    # One that runs is meant rather than one that did.
    having = [name for name in having if Runtime.of(name, runtime_dir).live_pid() is not None] or having
    if len(having) == 1:
        return find_target(having[0], runtime_dir), tuple(words)
    asked = " and ".join(words)
    if having:
        raise UsageError(f"{asked} is a stage of several deployments: {', '.join(having)}; name one of them first")
    there = "; ".join(f"{name}: {', '.join(stages)}" for name, stages in known.items()) or "none"
    raise UsageError(f"{asked} is neither a deployment nor a stage here (deployments and their stages: {there})")


def stage_names(runtime: Runtime) -> tuple[str, ...]:
    """The stages that the last run was to start, in its order, then others of which a log is left."""
    try:
        told = [str(run["name"]) for run in json.loads(read_regular(runtime.run_file))]
    except (OSError, ValueError, TypeError, KeyError):
        told = []
    logged = sorted(path.name.removesuffix(".log") for path in runtime.logs.glob("*.log"))
    return tuple(dict.fromkeys((*told, *logged)))


def _known(target: Target, stages: Sequence[str]) -> tuple[str, ...]:
    known = stage_names(target.runtime)
    if unknown := [name for name in stages if name not in known]:
        there = ", ".join(known) or "none"
        raise UsageError(f"{', '.join(unknown)}: no such stage in deployment {target.name} (there are: {there})")
    return tuple(stages)


def runtime_of(loaded: LoadedDeployment, runtime_dir: Path | None) -> Runtime:
    """Where the deployment keeps its files: the command line's word, then the config's, then the default."""
    return Runtime.of(loaded.deployment.name, runtime_dir or loaded.runtime_dir)
