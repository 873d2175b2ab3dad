"""One stage on its way down: ask, TERM, KILL, give up. A pure clock; ``core.launch`` keeps one a stage that ends.

All stages of a stop begin at the same time and so share its deadlines; a stage that is restarted alone has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum


@dataclass(frozen=True)
class StopLadder:
    """When the rungs of a stop are due, counted from its beginning."""

    term_after_s: float = 12.0
    """TERM for a ready stage that was only asked; others get it at once."""
    kill_after_s: float = 15.0
    give_up_after_s: float = 25.0
    """What survived KILL this long after it was due is abandoned, and named."""
    booting_kill_after_s: float = 3.0
    """KILL for a stage that was not ready: it has nothing to hand over. Never later than for one that was."""

    def __post_init__(self) -> None:
        if not 0 <= self.term_after_s <= self.kill_after_s <= self.give_up_after_s or self.booting_kill_after_s < 0:
            raise ValueError(f"cannot use {self}: its times must not descend; order term, kill, give up")


class Rung(IntEnum):
    """How far down a stage was sent."""

    NONE = 0
    ASKED = 1
    TERMED = 2
    KILLED = 3
    GIVEN_UP = 4


@dataclass(frozen=True)
class Descent:
    """Where one stage is on the ladder."""

    began_at_s: float
    orderly: bool
    """It was ready, so it is asked first and has the longer grace."""
    hurry: bool = False
    """No more waiting before KILL."""
    rung: Rung = Rung.NONE
    killed_at_s: float | None = None

    def next_at_s(self, ladder: StopLadder) -> float:
        """When the next rung is due."""
        match self.rung:
            case Rung.NONE:
                return self.began_at_s
            case Rung.ASKED if not self.hurry:
                return self.began_at_s + ladder.term_after_s
            case Rung.TERMED if not self.hurry:
                return self.began_at_s + self._kill_after_s(ladder)
            case Rung.KILLED | Rung.GIVEN_UP:
                # Counted from the KILL: one that came early or late leaves the stage as long to die as one on time.
                killed_at_s = self.began_at_s if self.killed_at_s is None else self.killed_at_s
                return killed_at_s + (ladder.give_up_after_s - ladder.kill_after_s)
            case _:
                return self.began_at_s

    def _kill_after_s(self, ladder: StopLadder) -> float:
        return ladder.kill_after_s if self.orderly else min(ladder.booting_kill_after_s, ladder.kill_after_s)

    def advance(self, ladder: StopLadder, at_s: float) -> tuple[Descent, tuple[Rung, ...]]:
        """Every rung that is due, in order; giving up only in a later step than KILL, which must have its effect."""
        now, taken = self, list[Rung]()
        while now.rung is not Rung.GIVEN_UP and at_s >= now.next_at_s(ladder):
            now = now._down(at_s)
            taken.append(now.rung)
            if now.rung is Rung.KILLED:
                break
        return now, tuple(taken)

    def _down(self, at_s: float) -> Descent:
        match self.rung:
            case Rung.NONE:
                return replace(self, rung=Rung.ASKED if self.orderly else Rung.TERMED)
            case Rung.ASKED:
                return replace(self, rung=Rung.TERMED)
            case Rung.TERMED:
                return replace(self, rung=Rung.KILLED, killed_at_s=at_s)
            case _:
                return replace(self, rung=Rung.GIVEN_UP)
