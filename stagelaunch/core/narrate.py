"""The lines a person reads while a stage boots: one per transition, none for what repeats."""

from __future__ import annotations

from stagelaunch.core import messages as m
from stagelaunch.core.board import PhaseSpan, StageView
from stagelaunch.core.phases import Phase
from stagelaunch.core.units import format_duration, format_size


def narrate(before: StageView, after: StageView, message: m.Message) -> tuple[str, ...]:
    """What one message is worth saying, given the view before and after it."""
    match message:
        case m.PhaseBegan(phase, _):
            return (f"{before.phase} -> {phase}{_took(after)}",)
        case m.LockWaits(phase, mode, holders, _) if holders != before.lock_holders:
            return (f"{phase} waits for the {mode} device lock, held by {'; '.join(holders) or 'nobody on record'}",)
        case m.Progress(phase, done, total, unit, _) if done == total:
            amount = format_size(total) if unit == "bytes" else f"{total} {unit}"
            return (f"{phase} 100 % ({amount})",)
        case m.LedgerKnown(ledger, False):
            kv = f"{ledger.num_blocks} KV blocks" if ledger.num_blocks else "no KV cache"
            return (f"sized: {kv} in a budget of {format_size(ledger.budget.size_bytes)}",)
        case m.Ready(at_s):
            return (f"{before.phase} -> ready{_took(after)}, {format_duration(at_s - after.spawned_s)} in all",)
        case m.LogLost(text):
            return (text,)
        case _:
            return ()


def _took(view: StageView) -> str:
    """How long the phase that just ended took."""
    if not view.spans:
        return ""
    span: PhaseSpan = view.spans[-1]
    text = f", {span.phase} took {format_duration(span.ended_s - span.began_s)}"
    waited = span.phase is not Phase.SPAWN and span.waited_s >= 0.01
    return f"{text} ({format_duration(span.waited_s)} of it waiting for locks)" if waited else text
