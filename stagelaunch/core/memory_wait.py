"""What is said while a deployment waits for device memory, and when. Pure: `supervisor.waiting` has the clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagelaunch.core.units import format_duration

REMIND_S = 10.0
"""How often it is said that the wait goes on."""


@dataclass(frozen=True)
class MemoryWait:
    """One wait: how long it may last and what was said last."""

    wait_s: float
    deadline_s: float
    said_at_s: float = 0.0
    in_the_way: frozenset[str] | None = None
    """Who, when last said; None before the first time."""
    findings: tuple[str, ...] = ()

    def left_s(self, now_s: float) -> float:
        """How long it may still last; 0 when it is over."""
        return max(0.0, self.deadline_s - now_s)


def hear(
    wait: MemoryWait, now_s: float, findings: tuple[str, ...], in_the_way: frozenset[str]
) -> tuple[MemoryWait, tuple[str, ...]]:
    """It still does not fit: the wait from now on, and what to say.

    Who is in the way is said at first and when that changes; how long is left at times, with the amounts if they are
    others by then: those change with every poll while a neighbour boots.
    """
    said = replace(wait, said_at_s=now_s, in_the_way=in_the_way, findings=findings)
    left = f"{format_duration(wait.left_s(now_s))} left"
    if wait.in_the_way is None:
        head = f"does not fit now: waiting for device memory for up to {format_duration(wait.wait_s)}"
        return said, (head, *findings)
    if in_the_way != wait.in_the_way:
        return said, (f"still waiting for device memory, {left}; others hold or claim it now", *findings)
    if now_s - wait.said_at_s >= REMIND_S:
        return said, (f"still waiting for device memory, {left}", *(findings if findings != wait.findings else ()))
    return wait, ()


def gave_up(wait: MemoryWait, deployment: str, findings: tuple[str, ...]) -> tuple[str, ...]:
    """The findings of a wait that is over."""
    return (
        f"cannot admit deployment {deployment}: device memory did not become free within "
        f"{format_duration(wait.wait_s)}; stop who holds it, or wait longer",
        *findings,
    )
