"""How long a stop may take, and how that time is divided: from the config's timeouts, or for a CI runner.

Pure. Used by the supervisor, and by the unit generator, which must give the service manager more patience than this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagelaunch.core.descent import StopLadder

if TYPE_CHECKING:
    # Only its name: pydantic behind it would cost every worker a part of a second.
    from stagelaunch.core.config import Timeouts

ASK_SHARE = 0.8
"""Of the grace: what a ready stage has to answer to being asked before TERM."""
KILL_WAIT_S = 10.0
"""How long the kernel gets to remove what was killed."""
STRAYS_S = 2.0
"""How long it gets to remove what stages have left; the warden comes after."""


@dataclass(frozen=True)
class StopPlan:
    """The ladder of a stop, and the wait for device memory after it."""

    ladder: StopLadder
    memory_s: float
    strays_s: float = STRAYS_S

    @property
    def longest_s(self) -> float:
        """From the request to the end, at worst."""
        return self.ladder.give_up_after_s + self.strays_s + self.memory_s


CI = StopPlan(StopLadder(term_after_s=1.2, kill_after_s=1.8, give_up_after_s=2.8, booting_kill_after_s=1.0), 0.8, 0.4)
"""A runner that cancels a job kills what is left some seconds later: 4 s in all, whatever the config says."""


def stop_plan(timeouts: Timeouts, *, ci: bool) -> StopPlan:
    """The plan of the config; with ``ci`` the short one."""
    if ci:
        return CI
    grace_s = timeouts.stop_s
    ladder = StopLadder(
        term_after_s=ASK_SHARE * grace_s,
        kill_after_s=grace_s,
        give_up_after_s=grace_s + KILL_WAIT_S,
        booting_kill_after_s=min(timeouts.stop_booting_s, grace_s),
    )
    return StopPlan(ladder, timeouts.memory_s)
