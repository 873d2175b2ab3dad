"""What happens to a deployment and its stages, as records for programs: what ``stagelaunch events`` prints.

`of_message` derives them from a worker's messages, beside `narrate`, which says the same to people; the rest is
added where the supervisor does or finds it. Not the keeping of them (`supervisor.events`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import floor
from typing import Any

from stagelaunch.core import messages as m
from stagelaunch.core.board import StageView
from stagelaunch.core.failure import StageFailure
from stagelaunch.core.phases import Phase


class EventKind(StrEnum):
    """The kinds. READY and ENDED are of the deployment when they name no stage."""

    ADMITTING = "admitting"
    BOOTING = "booting"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"
    STARTED = "started"
    PHASE = "phase"
    LOCK_WAIT = "lock_wait"
    LOCK_TAKEN = "lock_taken"
    PROGRESS = "progress"
    SIZED = "sized"
    FAILED = "failed"
    RESTARTING = "restarting"
    LOG_LOST = "log_lost"
    LOST = "lost"
    """Not an event: so many older ones are not kept any more (``count``)."""


@dataclass(frozen=True)
class News:
    """Something that has just happened. ``stage`` is None for the deployment as a whole."""

    event: EventKind
    stage: str | None = None
    pid: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values, by kind of event."""


@dataclass(frozen=True)
class Event:
    """News with its number, from 1 without a gap, and its time."""

    seq: int
    at: float
    """Unix seconds."""
    elapsed_s: float
    """Since the run began."""
    news: News

    def to_json(self) -> dict[str, Any]:
        """The record as it is printed; stage and pid only where there is one."""
        whose = {"stage": self.news.stage, "pid": self.news.pid}
        return {
            "seq": self.seq,
            "at": round(self.at, 6),
            "elapsed_s": round(self.elapsed_s, 6),
            "event": self.news.event,
            **{key: value for key, value in whose.items() if value is not None},
            **self.news.more,
        }


def of_message(before: StageView, after: StageView, message: m.Message, pid: int | None) -> tuple[News, ...]:
    """What one message of a worker is as events, given the view before and after it."""
    found = _of_message(before, after, message)
    return () if found is None else (News(found[0], after.name, pid, found[1]),)


def _of_message(before: StageView, after: StageView, message: m.Message) -> tuple[EventKind, dict[str, Any]] | None:
    match message:
        case m.PhaseBegan(phase, _):
            return EventKind.PHASE, {"phase": phase, "previous": before.phase, **_took(after)}
        case m.LockWaits(phase, mode, holders, _) if _is_new_wait(before, holders):
            return EventKind.LOCK_WAIT, {"phase": phase, "mode": mode, "holders": list(holders)}
        case m.LockTaken(phase, mode, waited_s, _):
            return EventKind.LOCK_TAKEN, {"phase": phase, "mode": mode, "waited_s": waited_s}
        case m.Progress(phase, done, total, unit, _) if _is_next_second(before, message):
            return EventKind.PROGRESS, {"phase": phase, "done": done, "total": total, "unit": unit}
        case m.LedgerKnown(ledger, False):
            return EventKind.SIZED, {"num_blocks": ledger.num_blocks, "budget_bytes": ledger.budget.size_bytes}
        case m.Ready(at_s):
            return EventKind.READY, {"boot_s": at_s - after.spawned_s, **_took(after)}
        case m.LogLost(text):
            return EventKind.LOG_LOST, {"text": text}
        case _:
            return None


def _is_new_wait(before: StageView, holders: tuple[str, ...]) -> bool:
    return before.lock_wait_since_s is None or holders != before.lock_holders


def _is_next_second(before: StageView, message: m.Progress) -> bool:
    """Whether a second began since what the stage said before: so there is at most one in each."""
    last_s = before.phase_began_s if before.progress is None else before.progress.at_s
    return floor(message.at_s) > floor(last_s)


def _took(view: StageView) -> dict[str, float]:
    """Of the phase that just ended."""
    if not view.spans:
        return {}
    span = view.spans[-1]
    return {"took_s": span.ended_s - span.began_s, "waited_s": 0.0 if span.phase is Phase.SPAWN else span.waited_s}


def of_failure(failure: StageFailure) -> News:
    """A stage, or the boot as a whole, has failed."""
    more = {"kind": failure.error, "phase": failure.phase, "text": failure.summary}
    return News(EventKind.FAILED, failure.stage, failure.pid, more)
