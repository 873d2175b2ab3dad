"""A boot's timeline as a Chrome trace, which Perfetto and chrome://tracing open.

The JSON object format: a process per device, a thread per stage, a slice per phase with the lock waits as slices
inside it, and an arrow wherever a lock changes hands on the critical path. Used by ``stagelaunch report --trace``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stagelaunch.core.critical import LinkKind, critical_path
from stagelaunch.core.timeline import Attempt, Piece, Timeline, pieces


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace. Times are microseconds since the boot began."""
    events = [*_names(timeline)]
    for attempt in timeline.attempts:
        events += _slices(attempt, timeline.as_of_s)
    events += _arrows(timeline)
    about = {"deployment": timeline.deployment, "started_at": timeline.started_at, "state": timeline.state}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for device in sorted({attempt.device for attempt in timeline.attempts}):
        name = {"name": f"device {device}"}
        yield {"ph": "M", "name": "process_name", "pid": _process(device), "tid": _process(device), "args": name}
    for attempt in {attempt.stage_id: attempt for attempt in timeline.attempts}.values():
        yield {"ph": "M", "name": "thread_name", **_track(attempt), "args": {"name": attempt.stage}}


def _slices(attempt: Attempt, as_of_s: float) -> Iterator[dict[str, Any]]:
    parts = pieces(attempt, as_of_s)
    for record in attempt.phases:
        own = [piece for piece in parts if piece.phase is record.phase]
        if own:
            args = {} if record.done_bytes is None else {"bytes": record.done_bytes}
            args |= {} if attempt.pid is None else {"process": attempt.pid}
            yield _slice(attempt, "phase", record.phase, own[0].began_s, own[-1].ended_s, args)
        yield from (_wait(attempt, piece) for piece in own if piece.waits_for is not None)


def _wait(attempt: Attempt, piece: Piece) -> dict[str, Any]:
    assert piece.waits_for is not None
    args = {"mode": piece.waits_for.mode, "held by": list(piece.waits_for.holders)}
    name = f"waits for the {piece.waits_for.mode} lock"
    return _slice(attempt, "lock-wait", name, piece.began_s, piece.ended_s, args)


def _slice(
    attempt: Attempt, category: str, name: str, began_s: float, ended_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    # Both ends rounded, not the length: what lies inside must not stick out.
    began = _microseconds(began_s)
    times = {"ts": began, "dur": _microseconds(ended_s) - began}
    return {"ph": "X", "cat": category, "name": name, **_track(attempt), **times, "args": args}


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """From whoever let a lock go to whoever had waited for it."""
    tracks = {attempt.stage: _track(attempt) for attempt in timeline.attempts}
    links = [link for link in critical_path(timeline) if link.kind is LinkKind.HANDOVER]
    for number, link in enumerate(links, 1):
        shared = {"cat": "critical-path", "name": "lock", "id": number}
        yield {"ph": "s", **shared, **tracks[link.after], "ts": _microseconds(link.began_s)}
        yield {"ph": "f", "bp": "e", **shared, **tracks[link.stage], "ts": _microseconds(link.ended_s)}


def _track(attempt: Attempt) -> dict[str, Any]:
    return {"pid": _process(attempt.device), "tid": attempt.stage_id + 1}


def _process(device: int) -> int:
    # Perfetto takes 0 for the kernel's idle process, and shows its threads as those of others.
    return device + 1


def _microseconds(time_s: float) -> int:
    # Whole ones: where a viewer cuts fractions off, a slice would end after the next one begins.
    return round(time_s * 1e6)
