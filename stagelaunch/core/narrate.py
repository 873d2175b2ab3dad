"""The lines a person reads while a deployment boots, is healed and stops: one per transition, none for what repeats."""

from __future__ import annotations

from collections.abc import Mapping

from stagelaunch.core import messages as m
from stagelaunch.core.board import PhaseSpan, StageView
from stagelaunch.core.failure import StageFailure
from stagelaunch.core.launch_model import LaunchState
from stagelaunch.core.phases import Phase
from stagelaunch.core.restarts import RestartBudget
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


def restart_text(state: LaunchState, stage_id: int, now_s: float) -> str:
    """What becomes of a stage that is to be started again because it failed."""
    allowed, granted = state.policy.restarts, state.restarts[stage_id]
    assert allowed is not None
    pause = format_duration(max(state.restart_at_s[stage_id] - now_s, 0.0))
    budget = f"restart {len(allowed.counting(granted, now_s))} of {allowed.max_restarts}"
    within = format_duration(allowed.within_s)
    return f"is started again in {pause} ({budget} within {within}; {len(granted)} since the start)"


FINAL_TEXT = "is not started again: it would only fail again"


def used_up_text(allowed: RestartBudget) -> str:
    """Why what failed is not started again once more."""
    within = format_duration(allowed.within_s)
    return f"is not started again: {allowed.max_restarts} restarts within {within} are used up"


def stop_text(state: LaunchState) -> str:
    """Why everything stops: the first failure, or what was asked for."""
    first = state.first_failure
    if first is None:
        return str(state.stop_reason)
    return first.cause.headline() if isinstance(first.cause, StageFailure) else str(first.cause)


def late_boot_text(views: Mapping[str, StageView | None], boot_s: float) -> str:
    """That the boot deadline has passed, and for which stages, by name, it waited."""
    missing = ", ".join(
        f"{name} ({'not started' if view is None else f'in phase {view.phase}'})"
        for name, view in views.items()
        if view is None or view.ready_at_s is None
    )
    return f"boot not finished after {boot_s:g}s (boot deadline); waited for {missing}"
