"""What a changed deployment file means for the deployment that runs: what is taken over now, what waits for a restart.

Pure: both deployments come in as read, devices as written; the merged one and what to say go out.
``supervisor.reload`` reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagelaunch.core.config import Deployment, to_raw
from stagelaunch.core.config_rules import Loc, path_text
from stagelaunch.core.units import GIB, KIB, MIB, TIB

TAKEN_OVER = ("timeouts", "on_failure", "restarts", "memory_tolerance_bytes", "logs")
"""What can change while stages run, by attribute; everything else is read at the start only."""
NEXT_START = "(takes effect at the next `up`)"
NOT_SET = "not set"
MAX_VALUE_CHARS = 80
_TAKEN_OVER_KEYS = {Deployment.model_fields[name].alias or name for name in TAKEN_OVER}
_SIZES = ("reserve", "memory_tolerance", "max_size", "context", "budget", "devices")
"""Keys whose bare numbers are bytes."""


@dataclass(frozen=True)
class Reloaded:
    """The deployment from now on, and every difference in one line each."""

    deployment: Deployment
    lines: tuple[str, ...]


def reload(running: Deployment, newly_read: Deployment) -> Reloaded:
    """The running one with what can be taken over from the new one, and what differs, in the order of the file.

    Stages are matched by name. Without a difference the one line says so.
    """
    old, new = _flat(running), _flat(newly_read)
    lines = [*_stages(running, newly_read)]
    for loc in dict.fromkeys((*old, *new)):
        before, after = old.get(loc), new.get(loc)
        if before != after and not _is_in_one_only(loc, running, newly_read):
            later = "" if loc[0] in _TAKEN_OVER_KEYS else f" {NEXT_START}"
            lines.append(f"{path_text(loc)}: {_change(loc, before, after)}{later}")
    return Reloaded(take_over(running, newly_read), tuple(lines) or ("nothing has changed",))


def take_over(running: Deployment, newly_read: Deployment) -> Deployment:
    """``running``, in whatever form its devices are, with the parts of ``newly_read`` that need no restart."""
    return running.model_copy(update={name: getattr(newly_read, name) for name in TAKEN_OVER})


def _stages(running: Deployment, newly_read: Deployment) -> Iterator[str]:
    old, new = _names(running), _names(newly_read)
    yield from (f"stages.{name}: removed {NEXT_START}" for name in old if name not in new)
    yield from (f"stages.{name}: added {NEXT_START}" for name in new if name not in old)


def _names(deployment: Deployment) -> tuple[str, ...]:
    return tuple(stage.name for stage in deployment.stages)


def _is_in_one_only(loc: Loc, running: Deployment, newly_read: Deployment) -> bool:
    """Whether it belongs to a stage that was added or removed, which is said already."""
    return loc[0] == "stages" and not (loc[1] in _names(running) and loc[1] in _names(newly_read))


def _flat(deployment: Deployment) -> dict[Loc, Any]:
    """Every value by its place; the stages by their names, lists whole."""
    raw = to_raw(deployment)
    raw["stages"] = {stage["name"]: stage for stage in raw["stages"]}
    return dict(_leaves((), raw))


def _leaves(loc: Loc, value: Any) -> Iterator[tuple[Loc, Any]]:
    if not isinstance(value, Mapping):
        yield loc, value
        return
    for key, item in value.items():
        yield from _leaves((*loc, str(key)), item)


def _change(loc: Loc, before: Any, after: Any) -> str:
    # Tokens and passwords come in environment variables, and this goes to logs.
    if loc[0] == "stages" and loc[2] == "env":
        return "changed" if before is not None and after is not None else "added" if before is None else "removed"
    return f"{_spelled(loc, before)} -> {_spelled(loc, after)}"


def _spelled(loc: Loc, value: Any) -> str:
    """As one would write it in the file."""
    match value:
        case None:
            return NOT_SET
        case int() if not isinstance(value, bool) and (loc[-1] in _SIZES or loc[-2:-1] == ("devices",)):
            return _size(value)
        case str():
            text = value
        case _:
            text = json.dumps(value)
    plain = text if text.isprintable() else json.dumps(text)
    return plain if len(plain) <= MAX_VALUE_CHARS else f"{plain[: MAX_VALUE_CHARS - 3]}..."


def _size(size_bytes: int) -> str:
    """``64MiB``: the largest unit that gives a whole number."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B"
