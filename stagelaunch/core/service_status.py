"""What a service manager is told about a deployment: its status in one line, and whether it gets on.

Pure: the views of the stages and the time come in, text and verdicts go out. ``supervisor.service`` sends them; the
unit file (``core.unit_file``) takes its timeouts from here, so that both sides count alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stagelaunch.core.board import LOCK_SLACK_S, StageView
from stagelaunch.core.config import Timeouts
from stagelaunch.core.phases import BOOT_PHASES, Phase
from stagelaunch.core.stop_plan import stop_plan
from stagelaunch.core.units import format_duration

Views = Mapping[int, StageView | None]
"""Every stage by id; None for one that was not started yet."""
SLACK_S = 10.0
"""Between our own bound and the service manager's: ours ends things first, and says why."""
MAX_STATUS_CHARS = 250


@dataclass(frozen=True)
class Progress:
    """What a deployment has got done, as far as can be seen; two that are equal mean that nothing moved between."""

    steps: tuple[tuple[object, ...], ...]


def progress_of(views: Views) -> Progress:
    """The steps taken so far: a phase, a lock that was got, bytes or graphs moved, a stage that became ready.

    Beginning to wait for a lock is none.
    """
    return Progress(tuple((stage_id, *_steps(view)) for stage_id, view in sorted(views.items())))


def _steps(view: StageView | None) -> tuple[object, ...]:
    if view is None:
        return ()
    done = None if view.progress is None else view.progress.done
    return (view.spawned_s, view.phase, view.phase_began_s, view.waited_s, done)


def waits_for_others(views: Views, lock_s: float, now_s: float) -> bool:
    """Whether every stage that boots waits for a device lock, none of them longer than its lock deadline allows.

    Then a stranger has the locks: there is nothing of ours that could move, the wait has a deadline of its own, and
    when that passes the boot fails with the holder's name, which a service manager could not tell. So it counts as
    getting on. While one of ours works, it is the one that is waited for, and its own movement decides: a stage that
    hangs with a lock must not be kept alive by its neighbours that wait for it.
    """
    booting = [view for view in views.values() if view is not None and view.phase not in (Phase.READY, Phase.STOP)]
    return bool(booting) and all(
        view.lock_wait_since_s is not None and now_s < view.lock_wait_since_s + lock_s + LOCK_SLACK_S
        for view in booting
    )


def booting_text(views: Views, now_s: float) -> str:
    """``booting: 1 of 3 ready; thinker: load 43 %, 12s``: the stage that is furthest behind, and for how long."""
    ready = sum(view is not None and view.phase is Phase.READY for view in views.values())
    text = f"booting: {ready} of {len(views)} ready"
    slowest = _slowest(views)
    return text if slowest is None else f"{text}; {slowest.name}: {_doing(slowest, now_s)}"


def ready_text(views: Views) -> str:
    """``ready: 3 stages``."""
    return f"ready: {len(views)} stage{'s' if len(views) != 1 else ''}"


def one_line(text: str) -> str:
    """What fits a status: one line, printable, not too long."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return plain if len(plain) <= MAX_STATUS_CHARS else f"{plain[: MAX_STATUS_CHARS - 3]}..."


def _slowest(views: Views) -> StageView | None:
    """Of those that boot: the earliest phase, in it the smallest share done, then the longest in it."""
    booting = [view for view in views.values() if view is not None and view.phase in BOOT_PHASES]
    return min(
        booting, key=lambda view: (BOOT_PHASES.index(view.phase), _percent(view) or 0, view.phase_began_s), default=None
    )


def _percent(view: StageView) -> int | None:
    progress = view.progress
    return None if progress is None or progress.total <= 0 else 100 * progress.done // progress.total


def _doing(view: StageView, now_s: float) -> str:
    if view.lock_wait_since_s is not None:
        return f"{view.phase} waits for the device lock, {_whole(now_s - view.lock_wait_since_s)}"
    percent = _percent(view)
    share = "" if percent is None else f" {percent} %"
    return f"{view.phase}{share}, {_whole(now_s - view.phase_began_s)}"


def _whole(duration_s: float) -> str:
    return f"{duration_s:.0f}s" if duration_s < 60 else format_duration(duration_s)


def quiet_bound_s(timeouts: Timeouts) -> float:
    """Longest time a boot that is in order may show no progress: what a service manager should wait for the next."""
    return max(timeouts.phase_s, timeouts.lock_s + LOCK_SLACK_S, timeouts.driver_s) + SLACK_S


def stop_bound_s(timeouts: Timeouts) -> float:
    """Longest time a stop takes: the ladder, the wait for device memory, and a driver that does not answer."""
    return stop_plan(timeouts, ci=False).longest_s + timeouts.driver_s + SLACK_S
