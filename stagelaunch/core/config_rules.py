"""Rules between the fields of a deployment, over the raw mapping a file holds.

They work on raw data, and skip what they cannot read, so that a file with a wrong field somewhere still gets every
other fault reported. A field that is wrong by itself is ``core.config``'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagelaunch.core.units import parse_duration

Loc = tuple[str | int, ...]
ENGINE_QWEN3_OMNI = "qwen3-omni"
AUTO = "auto"
COMPONENTS = ("thinker", "talker", "code2wav")
_TIMEOUT_DEFAULTS = {"phase": "300s", "stage": "600s", "boot": "900s", "lock": "300s", "heartbeat": "30s"}
_SHORTEST_HEARTBEAT_S = 1.0
"""Below it a busy machine is taken for a dead stage."""
_SHOWN_SIZES = 5
"""Of the graphs of a stage that are too large, those that are named; a list may have thousands."""
_BACKOFF_DEFAULTS = {"backoff": "1s", "backoff_max": "60s"}
_NESTED_TIMEOUTS = (("phase", "stage"), ("stage", "boot"), ("lock", "stage"))


@dataclass(frozen=True)
class Conflict:
    """Fields that do not go together. ``loc`` leads to the one to change."""

    loc: Loc
    text: str

    def __str__(self) -> str:
        return f"{path_text(self.loc)}: {self.text}" if self.loc else self.text


def path_text(loc: Loc) -> str:
    """``stages[1].devices[0]`` for ("stages", 1, "devices", 0)."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if part.isprintable() and len(part) <= 60 else repr(part)[:60]
            text += f".{shown}" if text else shown
    return text


def all_conflicts(raw: Any) -> tuple[Conflict, ...]:
    """Every conflict inside a deployment as a file holds it, of whatever shape."""
    if not isinstance(raw, Mapping):
        return ()
    found = [*_below("timeouts", between_timeouts(raw.get("timeouts")))]
    found += _below("restarts", between_restarts(raw.get("restarts")))
    for position, stage in enumerate(_stages(raw)):
        found += _below("stages", _below(position, in_stage(stage)))
    return (*found, *in_whole(raw))


def between_timeouts(raw: Any) -> tuple[Conflict, ...]:
    """phase < stage < boot and lock < stage, both values named; a heartbeat that can be kept."""
    if not isinstance(raw, Mapping):
        return ()
    nested = tuple(
        _timeout_conflict(raw, inner, outer)
        for inner, outer in _NESTED_TIMEOUTS
        if (inner_s := _seconds(raw, inner)) is not None
        and (outer_s := _seconds(raw, outer)) is not None
        and inner_s >= outer_s
    )
    return (*nested, *_heartbeat(raw))


def _heartbeat(raw: Mapping[Any, Any]) -> tuple[Conflict, ...]:
    heartbeat_s = _seconds(raw, "heartbeat")
    if heartbeat_s is None or heartbeat_s <= 0 or heartbeat_s >= _SHORTEST_HEARTBEAT_S:
        return ()
    return (Conflict(("heartbeat",), f"heartbeat {raw['heartbeat']} is too short to be kept; give at least 1s"),)


def between_restarts(raw: Any) -> tuple[Conflict, ...]:
    """The first pause is not above the longest one."""
    if not isinstance(raw, Mapping):
        return ()
    try:
        first_s, most_s = (parse_duration(raw.get(key, default)) for key, default in _BACKOFF_DEFAULTS.items())
    except (ValueError, TypeError):
        return ()
    if first_s <= most_s:
        return ()
    first, most = (str(raw.get(key, f"{default} (default)")) for key, default in _BACKOFF_DEFAULTS.items())
    return (Conflict(("backoff",), f"backoff {first} is above backoff_max {most}; raise backoff_max or lower backoff"),)


def in_stage(raw: Any) -> tuple[Conflict, ...]:
    """One budget, tokens enough for the sequences, graphs no larger than a step, a component the engine has."""
    if not isinstance(raw, Mapping):
        return ()
    return (*_one_budget(raw), *_auto(raw), *_tokens(raw), *_graphs(raw), *_component(raw))


def in_whole(raw: Any) -> tuple[Conflict, ...]:
    """Unique ids and names of stages; a simulated machine and its devices if and only if the backend is simulated."""
    if not isinstance(raw, Mapping):
        return ()
    return (*_unique(raw, "id"), *_unique(raw, "name"), *_machine(raw), *_foreign_devices(raw))


def _below(part: str | int, conflicts: Sequence[Conflict]) -> tuple[Conflict, ...]:
    return tuple(Conflict((part, *conflict.loc), conflict.text) for conflict in conflicts)


def _stages(raw: Mapping[Any, Any]) -> Sequence[Any]:
    stages = raw.get("stages")
    return stages if isinstance(stages, list | tuple) else ()


def _seconds(raw: Mapping[Any, Any], key: str) -> float | None:
    try:
        return parse_duration(raw.get(key, _TIMEOUT_DEFAULTS[key]))
    except (ValueError, TypeError):
        return None


def _timeout_conflict(raw: Mapping[Any, Any], inner: str, outer: str) -> Conflict:
    def named(key: str) -> str:
        return f"{key} {raw[key]}" if key in raw else f"{key} {_TIMEOUT_DEFAULTS[key]} (default)"

    key = inner if inner in raw else outer
    return Conflict((key,), f"{named(inner)} is not below {named(outer)}; raise {outer} or lower {inner}")


def _one_budget(raw: Mapping[Any, Any]) -> tuple[Conflict, ...]:
    given = [key for key in ("utilization", "budget") if raw.get(key) is not None]
    if len(given) == 2:
        return (Conflict(("budget",), "utilization and budget are both given; keep one"),)
    if not given:
        text = "is missing; give a utilization like 0.9, a budget like 20GiB, or budget: auto"
        return (Conflict(("utilization",), text),)
    return ()


def _auto(raw: Mapping[Any, Any]) -> tuple[Conflict, ...]:
    """A budget worked out from the rest of the device: of one device, and with a weight only there."""
    devices = raw.get("devices")
    if raw.get("budget") != AUTO:
        if raw.get("kv_weight") is None:
            return ()
        return (Conflict(("kv_weight",), "goes with budget: auto only; take it out, or let the budget be auto"),)
    if isinstance(devices, list | tuple) and len(devices) > 1:
        return (Conflict(("budget",), "auto is worked out for a stage on one device; give a utilization or a size"),)
    return ()


def _count(raw: Mapping[Any, Any], key: str) -> int | None:
    value = raw.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _tokens(raw: Mapping[Any, Any]) -> tuple[Conflict, ...]:
    seqs, tokens = _count(raw, "max_num_seqs"), _count(raw, "max_num_batched_tokens")
    if seqs is None or tokens is None or tokens >= seqs:
        return ()
    text = f"{tokens} is below max_num_seqs {seqs}: a step needs one token for each sequence; raise it"
    return (Conflict(("max_num_batched_tokens",), text),)


def _graphs(raw: Mapping[Any, Any]) -> tuple[Conflict, ...]:
    seqs, graphs = _count(raw, "max_num_seqs"), raw.get("graphs")
    if seqs is None or not isinstance(graphs, list | tuple):
        return ()
    found = [
        Conflict(("graphs", position), f"{size} is above max_num_seqs {seqs}: it would never be used; take it out")
        for position, size in enumerate(graphs)
        if isinstance(size, int) and size > seqs
    ]
    if (more := len(found) - _SHOWN_SIZES) <= 0:
        return tuple(found)
    rest = Conflict(("graphs",), f"has {more:,} more sizes above max_num_seqs {seqs}; take them out as well")
    return (*found[:_SHOWN_SIZES], rest)


def _component(raw: Mapping[Any, Any]) -> tuple[Conflict, ...]:
    component = raw.get("component")
    if raw.get("engine", ENGINE_QWEN3_OMNI) != ENGINE_QWEN3_OMNI or not isinstance(component, str):
        return ()
    if component in COMPONENTS:
        return ()
    return (
        Conflict(("component",), f"{component!r:.60} is not one of {', '.join(COMPONENTS)} of {ENGINE_QWEN3_OMNI}"),
    )


def _unique(raw: Mapping[Any, Any], key: str) -> tuple[Conflict, ...]:
    first: dict[Any, int] = {}
    found: list[Conflict] = []
    for position, stage in enumerate(_stages(raw)):
        value = stage.get(key) if isinstance(stage, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | str):
            continue
        if value in first:
            text = f"{value!r:.60} is taken by stages[{first[value]}]; each stage needs its own {key}"
            found.append(Conflict(("stages", position, key), text))
        first.setdefault(value, position)
    return tuple(found)


def _machine(raw: Mapping[Any, Any]) -> tuple[Conflict, ...]:
    backend, machine = raw.get("backend"), raw.get("simulated")
    if backend == "simulated" and machine is None:
        text = "is missing; backend simulated needs a section like 'simulated: {devices: {0: 1GiB}}'"
        return (Conflict(("simulated",), text),)
    if backend == "cuda" and machine is not None:
        return (Conflict(("simulated",), "does not go with backend cuda; take it out or set backend: simulated"),)
    return ()


def _foreign_devices(raw: Mapping[Any, Any]) -> tuple[Conflict, ...]:
    """UUIDs of the other backend's devices."""
    backend = raw.get("backend")
    if backend not in ("cuda", "simulated"):
        return ()
    foreign = ("SIM-",) if backend == "cuda" else ("GPU-", "MIG-")
    return tuple(
        Conflict(("stages", position, "devices", place), f"{ref!r:.60} is no device of backend {backend}; name one")
        for position, stage in enumerate(_stages(raw))
        for place, ref in enumerate(_devices(stage))
        if isinstance(ref, str) and ref.startswith(foreign)
    )


def _devices(stage: Any) -> Sequence[Any]:
    devices = stage.get("devices") if isinstance(stage, Mapping) else None
    return devices if isinstance(devices, list | tuple) else ()
