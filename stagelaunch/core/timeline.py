"""When each stage did what during a boot: a record per process, folded from what it reports.

All times are seconds since the boot began; ``Timeline.started_at`` alone is wall-clock time. What follows from it
(critical path, floor) is ``core.critical``; ``supervisor.timeline`` keeps it and ``stagelaunch report`` shows it. The
file is written by `to_json` and read by `from_json`, which refuses whatever is not one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stagelaunch.core import messages as m
from stagelaunch.core.phases import BOOT_PHASES, LockMode, Phase

VERSION = 1
_LATEST_S = 1e11
"""No clock is ever this late: thirty centuries."""
_SIZE_MAX = 2**63


@dataclass(frozen=True)
class Hold:
    """One device lock that a phase took. Asked for and taken at the same time unless it had to be waited for."""

    mode: LockMode
    asked_s: float
    taken_s: float | None = None
    """None: still waiting."""
    released_s: float | None = None
    """None: held until the end of its phase, as far as is known."""
    holders: tuple[str, ...] = ()
    """Who had it when it was asked for, as the waiting process saw them."""


@dataclass(frozen=True)
class PhaseRecord:
    """One phase of one process."""

    phase: Phase
    began_s: float
    ended_s: float | None = None
    holds: tuple[Hold, ...] = ()
    done_bytes: int | None = None
    """Bytes that it said it has done; None where it did not say."""


@dataclass(frozen=True)
class Attempt:
    """One process of a stage, from its start on."""

    stage_id: int
    stage: str
    device: int
    pid: int | None
    spawned_s: float
    phases: tuple[PhaseRecord, ...] = ()
    ready_s: float | None = None
    failed_s: float | None = None
    """When it said that it gives up."""
    ended_s: float | None = None
    how: str = ""
    """How its process ended."""


@dataclass(frozen=True)
class Timeline:
    """A run as far as it was known ``as_of_s``. Attempts are in the order of their start."""

    deployment: str
    started_at: float
    """Unix seconds at which the boot began: the zero of all other times."""
    order: str
    groups: tuple[tuple[int, ...], ...]
    """Stages that boot one after another in serial order."""
    attempts: tuple[Attempt, ...]
    as_of_s: float
    state: str = "booting"
    """``booting``, ``ready``, ``failed`` or ``ended``."""
    boot_s: float | None = None
    """When every stage was ready for the first time."""
    failure: str = ""
    """The first failure, in one line."""

    @property
    def of_the_boot(self) -> tuple[Attempt, ...]:
        """The processes of the boot itself, without later restarts."""
        return tuple(a for a in self.attempts if self.boot_s is None or a.spawned_s < self.boot_s)

    @property
    def restarts(self) -> tuple[Attempt, ...]:
        """The processes that were started once everything was ready."""
        return self.attempts[len(self.of_the_boot) :]


@dataclass(frozen=True)
class Piece:
    """A stretch of an attempt in which one thing is true: it works under a lock (or none), or waits for one."""

    phase: Phase
    began_s: float
    ended_s: float
    mode: LockMode
    waits_for: Hold | None = None
    """The lock it waits for; ``mode`` is NONE then."""

    @property
    def took_s(self) -> float:
        """How long it is."""
        return self.ended_s - self.began_s


# Folding messages.


def begun(stage_id: int, stage: str, device: int, pid: int | None, spawned_s: float) -> Attempt:
    """A process that was just started."""
    spawn = PhaseRecord(Phase.SPAWN, spawned_s)
    return Attempt(stage_id, stage, device, pid, spawned_s, (spawn,))


def apply(attempt: Attempt, message: m.Message, zero_s: float) -> Attempt:
    """The attempt after one message; ``zero_s``: the monotonic second at which the boot began.

    Never raises: a time that goes back counts as the latest one known, one that is none is left out.
    """
    at_s = getattr(message, "at_s", None)
    if at_s is None or not abs(at_s) <= _LATEST_S or attempt.ready_s is not None or attempt.failed_s is not None:
        return attempt
    return _apply(attempt, message, max(at_s - zero_s, latest_s(attempt)))


def _apply(attempt: Attempt, message: m.Message, at_s: float) -> Attempt:
    last = attempt.phases[-1]
    match message:
        case m.PhaseBegan(phase) if phase in BOOT_PHASES and phase not in _begun(attempt):
            return _with_last(attempt, _closed(last, at_s), PhaseRecord(phase, at_s))
        case m.PhaseEnded():
            return _with_last(attempt, _closed(last, at_s))
        case m.LockWaits(_, mode, holders) if last.ended_s is None and not _is_waiting(last):
            before = _let_go(last, at_s).holds
            return _with_last(attempt, replace(last, holds=(*before, Hold(mode, at_s, holders=holders))))
        case m.LockTaken(_, mode) if last.ended_s is None:
            waiting = last.holds[-1] if _is_waiting(last) else None
            before = _let_go(last, at_s).holds if waiting is None else last.holds[:-1]
            taken = Hold(mode, at_s, at_s) if waiting is None else replace(waiting, taken_s=at_s)
            return _with_last(attempt, replace(last, holds=(*before, taken)))
        case m.LockReleased():
            return _with_last(attempt, _let_go(last, at_s))
        case m.Progress(_, done, _, "bytes") if 0 <= done < _SIZE_MAX:
            return _with_last(attempt, replace(last, done_bytes=done))
        case m.Ready():
            return replace(_with_last(attempt, _closed(last, at_s)), ready_s=at_s)
        case m.Failed():
            return replace(_with_last(attempt, _closed(last, at_s)), failed_s=at_s)
        case _:
            return attempt


def ended(attempt: Attempt, at_s: float, how: str) -> Attempt:
    """Its process is over."""
    return replace(attempt, ended_s=max(at_s, latest_s(attempt)), how=how)


def latest_s(attempt: Attempt) -> float:
    """The last moment at which anything is known of the attempt."""
    return _times(attempt)[-1]


def _times(attempt: Attempt) -> list[float]:
    """Every time of the attempt, in the order in which they must be."""
    found: list[float | None] = [attempt.spawned_s]
    for record in attempt.phases:
        found.append(record.began_s)
        for hold in record.holds:
            found += [hold.asked_s, hold.taken_s, hold.released_s]
        found.append(record.ended_s)
    found += [attempt.ready_s, attempt.failed_s, attempt.ended_s]
    return [time_s for time_s in found if time_s is not None]


def _begun(attempt: Attempt) -> tuple[Phase, ...]:
    return tuple(record.phase for record in attempt.phases)


def _with_last(attempt: Attempt, *records: PhaseRecord) -> Attempt:
    return replace(attempt, phases=(*attempt.phases[:-1], *records))


def _is_waiting(record: PhaseRecord) -> bool:
    return bool(record.holds) and record.holds[-1].taken_s is None


def _let_go(record: PhaseRecord, at_s: float) -> PhaseRecord:
    if not record.holds or record.holds[-1].taken_s is None or record.holds[-1].released_s is not None:
        return record
    return replace(record, holds=(*record.holds[:-1], replace(record.holds[-1], released_s=at_s)))


def _closed(record: PhaseRecord, at_s: float) -> PhaseRecord:
    if record.ended_s is not None:
        return record
    return replace(_let_go(record, at_s), ended_s=at_s)


# Reading it.


def end_s(attempt: Attempt, as_of_s: float) -> float:
    """Where the boot of this process ends: ready, given up, over, or not yet."""
    for time_s in (attempt.ready_s, attempt.failed_s, attempt.ended_s):
        if time_s is not None:
            return time_s
    return max(as_of_s, latest_s(attempt))


def pieces(attempt: Attempt, as_of_s: float) -> tuple[Piece, ...]:
    """The attempt from its start to its end in pieces without a gap; what lies between two phases is of the first."""
    ends = [record.began_s for record in attempt.phases[1:]]
    found = [
        piece for record, end in zip(attempt.phases, [*ends, end_s(attempt, as_of_s)]) for piece in _cut(record, end)
    ]
    return tuple(piece for piece in found if piece.took_s > 0)


def _cut(record: PhaseRecord, end: float) -> Iterable[Piece]:
    phase, at_s = record.phase, record.began_s
    for hold in record.holds:
        taken_s = end if hold.taken_s is None else hold.taken_s
        released_s = end if hold.released_s is None else hold.released_s
        yield Piece(phase, at_s, hold.asked_s, LockMode.NONE)
        yield Piece(phase, hold.asked_s, taken_s, LockMode.NONE, waits_for=hold)
        yield Piece(phase, taken_s, released_s, hold.mode)
        at_s = released_s
    yield Piece(phase, at_s, end, LockMode.NONE)


def waited_s(parts: Iterable[Piece]) -> float:
    """How much of it went into waiting for locks."""
    return sum(piece.took_s for piece in parts if piece.waits_for is not None)


# To a file and back.


def to_json(timeline: Timeline) -> dict[str, Any]:
    """Plain JSON values; `from_json` is its inverse."""
    return {"version": VERSION, **asdict(timeline)}


def to_text(timeline: Timeline) -> str:
    """The text of the file: `to_json` as JSON, without the copies that it makes."""
    return json.dumps({"version": VERSION, **vars(timeline)}, default=vars)


def from_json(body: Any) -> Timeline:
    """The timeline of a file's JSON. ValueError, saying what is wrong, for anything that is not one."""
    if not isinstance(body, dict) or "attempts" not in body:
        raise ValueError("it is not a timeline")
    if body.get("version") != VERSION:
        raise ValueError(f"it has version {body.get('version')!r}, not {VERSION}")
    try:
        return _timeline(body)
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})"[:300]) from error


def _timeline(body: Mapping[str, Any]) -> Timeline:
    found = Timeline(
        deployment=_text(body["deployment"]),
        started_at=_number(body["started_at"]),
        order=_text(body["order"]),
        groups=tuple(tuple(int(stage) for stage in group) for group in body["groups"]),
        attempts=tuple(_attempt(attempt) for attempt in body["attempts"]),
        as_of_s=_number(body["as_of_s"]),
        state=_text(body["state"]),
        boot_s=_optional(body["boot_s"]),
        failure=_text(body["failure"]),
    )
    last_s = max((attempt.ready_s or 0.0 for attempt in found.of_the_boot), default=0.0)
    if found.boot_s is not None and found.boot_s != last_s:
        raise ValueError(f"the boot ended after {found.boot_s:g}s, its last stage was ready after {last_s:g}s")
    return found


def _attempt(body: Mapping[str, Any]) -> Attempt:
    found = Attempt(
        stage_id=int(body["stage_id"]),
        stage=_text(body["stage"]),
        device=int(body["device"]),
        pid=None if body["pid"] is None else int(body["pid"]),
        spawned_s=_number(body["spawned_s"]),
        phases=tuple(_phase(record) for record in body["phases"]),
        ready_s=_optional(body["ready_s"]),
        failed_s=_optional(body["failed_s"]),
        ended_s=_optional(body["ended_s"]),
        how=_text(body["how"]),
    )
    times = _times(found)
    names = _begun(found)
    if not names or len(names) > len(set(names)) or found.phases[0].began_s > found.spawned_s or times != sorted(times):
        raise ValueError(f"the phases of stage {found.stage} are in no order")
    if not all(_follow_each_other(record) for record in found.phases) or None in (r.ended_s for r in found.phases[:-1]):
        raise ValueError(f"stage {found.stage} does two things at once")
    return found


def _follow_each_other(record: PhaseRecord) -> bool:
    """Whether each lock was let go of before the next one was asked for, and before the phase was over."""
    if any(None in (hold.taken_s, hold.released_s) for hold in record.holds[:-1]):
        return False
    return all(
        hold.released_s is None if hold.taken_s is None else hold.released_s is not None or record.ended_s is None
        for hold in record.holds[-1:]
    )


def _phase(body: Mapping[str, Any]) -> PhaseRecord:
    done, phase = body["done_bytes"], Phase(body["phase"])
    if phase not in BOOT_PHASES:
        raise ValueError(f"{phase} is no phase of a boot")
    return PhaseRecord(
        phase,
        _number(body["began_s"]),
        _optional(body["ended_s"]),
        tuple(_hold(hold) for hold in body["holds"]),
        None if done is None else _size(done),
    )


def _hold(body: Mapping[str, Any]) -> Hold:
    holders: Sequence[Any] = body["holders"]
    return Hold(
        LockMode(body["mode"]),
        _number(body["asked_s"]),
        _optional(body["taken_s"]),
        _optional(body["released_s"]),
        tuple(map(_text, holders)),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    # It is going to be shown on a terminal.
    return "".join(char if char.isprintable() else "?" for char in value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LATEST_S:
        raise TypeError(f"{value!r} is not a time")
    return float(value)


def _size(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _SIZE_MAX:
        raise TypeError(f"{value!r} is not a size")
    return value


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)
