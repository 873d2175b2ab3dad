"""What is known about each stage while it boots: a pure fold over the messages of its worker.

Status, progress lines, deadlines and the report all read the same view.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagelaunch.core import messages as m
from stagelaunch.core.ledger import Ledger
from stagelaunch.core.phases import Phase

LOCK_SLACK_S = 5.0
"""A worker ends its own lock wait; only one that does not is timed out from outside, this much later."""


@dataclass(frozen=True)
class PhaseSpan:
    """One phase that is over. ``waited_s`` of it was spent waiting for device locks."""

    phase: Phase
    began_s: float
    ended_s: float
    waited_s: float


@dataclass(frozen=True)
class Timeouts:
    """Relative deadlines of a boot, in seconds: phase < stage < boot."""

    phase_s: float
    stage_s: float
    boot_s: float
    lock_s: float
    heartbeat_s: float
    """Longest silence; a stage is asked three times as often whether it is there."""


@dataclass(frozen=True)
class Due:
    """When a stage is late next, what kind of failure that is, and what to say then."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class StageView:
    """One stage as its messages tell it. All times are monotonic seconds."""

    stage_id: int
    name: str
    phase: Phase
    spawned_s: float
    phase_began_s: float
    waited_s: float = 0.0
    """Lock waits of the current phase that are over."""
    lock_wait_since_s: float | None = None
    lock_holders: tuple[str, ...] = ()
    progress: m.Progress | None = None
    ledger: Ledger | None = None
    ledger_is_final: bool = False
    ready_at_s: float | None = None
    heard_at_s: float = 0.0
    """When anything was last heard of it."""
    spans: tuple[PhaseSpan, ...] = ()


def spawned(stage_id: int, name: str, at_s: float) -> StageView:
    """A stage whose process was just started."""
    return StageView(stage_id, name, Phase.SPAWN, at_s, at_s, heard_at_s=at_s)


def heard(view: StageView, at_s: float) -> StageView:
    """The stage gave a sign of life."""
    return replace(view, heard_at_s=at_s)


def apply(view: StageView, message: m.Message) -> StageView:
    """The view after one message of the stage's worker. Messages that say nothing about the boot change nothing."""
    match message:
        case m.PhaseBegan(phase, at_s):
            return replace(
                _close_spawn(view, at_s),
                phase=phase,
                phase_began_s=at_s,
                waited_s=0.0,
                progress=None,
                lock_wait_since_s=None,
                lock_holders=(),
            )
        case m.LockWaits(_, _, holders, at_s):
            since = view.lock_wait_since_s
            return replace(view, lock_wait_since_s=at_s if since is None else since, lock_holders=holders)
        case m.LockTaken(_, _, waited_s, _):
            return replace(view, waited_s=view.waited_s + waited_s, lock_wait_since_s=None, lock_holders=())
        case m.PhaseEnded(phase, at_s, waited_s):
            return replace(view, spans=(*view.spans, PhaseSpan(phase, view.phase_began_s, at_s, waited_s)))
        case m.Progress():
            return replace(view, progress=message)
        case m.LedgerKnown(ledger, final):
            return replace(view, ledger=ledger, ledger_is_final=final)
        case m.Ready(at_s):
            return replace(view, phase=Phase.READY, phase_began_s=at_s, ready_at_s=at_s, progress=None)
        case _:
            return view


def _close_spawn(view: StageView, at_s: float) -> StageView:
    """The first message of a worker ends the spawn phase, which no worker can report itself."""
    if view.phase is not Phase.SPAWN:
        return view
    return replace(view, spans=(PhaseSpan(Phase.SPAWN, view.spawned_s, at_s, 0.0),))


def stopping(view: StageView, at_s: float) -> StageView:
    """The stage was told to stop."""
    return replace(view, phase=Phase.STOP, phase_began_s=at_s, progress=None, lock_wait_since_s=None, lock_holders=())


def next_deadline(view: StageView, timeouts: Timeouts) -> Due | None:
    """When the stage is late next; None once it is told to stop. A ready stage can only fall silent.

    The phase deadline counts work only: while the stage waits for a lock, the lock deadline counts instead.
    """
    match view.phase:
        case Phase.STOP:
            return None
        case Phase.READY:
            return _silence(view, timeouts)
        case Phase.SPAWN | Phase.IMPORT:
            # An import holds the interpreter, so that nothing in the process can answer.
            dues = [_stage_deadline(view, timeouts), _inner_deadline(view, timeouts)]
        case _:
            dues = [_stage_deadline(view, timeouts), _inner_deadline(view, timeouts), _silence(view, timeouts)]
    return min(dues, key=lambda due: due.at_s)


def _silence(view: StageView, timeouts: Timeouts) -> Due:
    limit_s = timeouts.heartbeat_s
    text = f"did not answer for {limit_s:g}s (heartbeat); raise timeouts.heartbeat if it only needs longer"
    return Due(view.heard_at_s + limit_s, "heartbeat", text)


def _stage_deadline(view: StageView, timeouts: Timeouts) -> Due:
    text = f"not ready after {timeouts.stage_s:g}s (stage deadline); raise timeouts.stage if it only needs longer"
    return Due(view.spawned_s + timeouts.stage_s, "deadline", text)


def _inner_deadline(view: StageView, timeouts: Timeouts) -> Due:
    if view.lock_wait_since_s is not None:
        holders = "; ".join(view.lock_holders) or "nobody on record"
        text = f"waited for the device lock longer than {timeouts.lock_s:g}s (lock deadline); held by {holders}"
        return Due(view.lock_wait_since_s + timeouts.lock_s + LOCK_SLACK_S, "deadline", text)
    text = (
        f"phase {view.phase} took longer than {timeouts.phase_s:g}s (phase deadline); "
        f"raise timeouts.phase if it only needs longer"
    )
    return Due(view.phase_began_s + view.waited_s + timeouts.phase_s, "deadline", text)
