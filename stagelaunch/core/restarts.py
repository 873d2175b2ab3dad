"""How often, and how soon after each other, something that failed may be started again.

Pure arithmetic over the times of earlier restarts. Used by ``core.launch`` for single stages and by the supervisor for
a deployment as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartBudget:
    """At most ``max_restarts`` within ``within_s``, each after a pause that doubles with every one that counts."""

    max_restarts: int
    within_s: float
    backoff_s: float
    backoff_max_s: float

    def counting(self, history: tuple[float, ...], now_s: float) -> tuple[float, ...]:
        """The restarts, by the time they were granted, that still count."""
        return tuple(at_s for at_s in history if now_s - at_s < self.within_s)

    def next_at_s(self, history: tuple[float, ...], now_s: float) -> float | None:
        """When to start again what failed now; None when the budget is used up."""
        recent = len(self.counting(history, now_s))
        if recent >= self.max_restarts:
            return None
        return now_s + min(self.backoff_s * 2.0**recent, self.backoff_max_s)
