"""The floor is below every schedule, and the critical path covers the whole boot: over boots of a small simulator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from stagelaunch.core import messages as m
from stagelaunch.core import timeline as tl
from stagelaunch.core.critical import LinkKind, critical_path, floor
from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.core.timeline import Timeline

ZERO_S = 1000.0
PHASES = (Phase.IMPORT, Phase.CONTEXT, Phase.LOAD, Phase.PROFILE, Phase.ALLOCATE, Phase.CAPTURE)


@dataclass(frozen=True)
class Plan:
    """What a stage does: phases of steps, each under a lock (or none) for whole seconds, so that sums are exact."""

    device: int
    phases: tuple[tuple[tuple[LockMode, int], ...], ...]

    def ops(self) -> Iterator[tuple[str, Phase | LockMode | int]]:
        for phase, steps in zip(PHASES, self.phases):
            yield "begin", phase
            for mode, took_s in steps:
                if mode is not LockMode.NONE:
                    yield "take", mode
                yield "work", took_s
                if mode is not LockMode.NONE:
                    yield "release", mode
            yield "end", phase
        yield "ready", 0


steps = st.tuples(st.sampled_from(LockMode), st.integers(0, 9))
phases = st.lists(st.lists(steps, max_size=3).map(tuple), max_size=len(PHASES)).map(tuple)
boots = st.lists(st.builds(Plan, st.integers(0, 1), phases), min_size=1, max_size=4)


class Simulator:
    """Boots the stages; who goes first where several can is chosen by dice."""

    def __init__(self, plans: list[Plan], order: str, dice: random.Random) -> None:
        self.plans, self.order, self.dice = plans, order, dice
        self.ops = [list(plan.ops()) for plan in plans]
        self.attempts: list[tl.Attempt | None] = [None] * len(plans)
        self.phase = [Phase.SPAWN] * len(plans)
        self.free_at = [0] * len(plans)
        self.holds = [LockMode.NONE] * len(plans)
        self.waits = [False] * len(plans)
        self.now = 0
        on_device = [[i for i, plan in enumerate(plans) if plan.device == device] for device in (0, 1)]
        self.groups = tuple(tuple(group) for group in on_device if group)

    def boot(self) -> Timeline:
        while any(self.ops):
            ids = list(range(len(self.plans)))
            self.dice.shuffle(ids)
            if not sum(self.moves(i) for i in ids):
                self.now = min(self.free_at[i] for i in ids if self.ops[i] and self.free_at[i] > self.now)
        attempts = sorted(filter(None, self.attempts), key=lambda a: a.spawned_s)
        boot_s = max(a.ready_s or 0.0 for a in attempts)
        return Timeline("sim", 0.0, self.order, self.groups, tuple(attempts), boot_s, "ready", boot_s)

    def moves(self, i: int) -> bool:
        """Take the next step of the stage, if it has one that it can take now."""
        if not self.ops[i] or self.free_at[i] > self.now or not self.may_start(i):
            return False
        kind, what = self.ops[i][0]
        if isinstance(what, LockMode) and kind == "take" and not self.takes(i, what):
            return False
        del self.ops[i][0]
        match what:
            case Phase():
                self.phase[i] = what
                self.say(i, m.PhaseBegan(what, self.at) if kind == "begin" else m.PhaseEnded(what, self.at, 0.0))
            case LockMode() if kind == "release":
                self.holds[i] = LockMode.NONE
                self.say(i, m.LockReleased(self.phase[i], what, self.at))
            case int() if kind == "work":
                self.free_at[i] = self.now + what
            case int():
                self.say(i, m.Ready(self.at))
        return True

    def may_start(self, i: int) -> bool:
        if self.attempts[i] is None:
            before = next(group[: group.index(i)] for group in self.groups if i in group)
            if self.order == "serial" and any(self.ops[j] for j in before):
                return False
            self.attempts[i] = tl.begun(i, f"stage{i}", self.plans[i].device, None, self.now)
        return True

    def takes(self, i: int, mode: LockMode) -> bool:
        others = {
            self.holds[j] for j in range(len(self.plans)) if j != i and self.plans[j].device == self.plans[i].device
        } - {LockMode.NONE}
        if others and LockMode.EXCLUSIVE in {*others, mode}:
            if not self.waits[i]:
                self.waits[i] = True
                self.say(i, m.LockWaits(self.phase[i], mode, ("somebody",), self.at))
            return False
        self.holds[i], self.waits[i] = mode, False
        self.say(i, m.LockTaken(self.phase[i], mode, 0.0, self.at))
        return True

    def say(self, i: int, message: m.Message) -> None:
        attempt = self.attempts[i]
        assert attempt is not None
        self.attempts[i] = tl.apply(attempt, message, ZERO_S)

    @property
    def at(self) -> float:
        return ZERO_S + self.now


@settings(max_examples=150, deadline=None)
@given(boots, st.sampled_from(["overlap", "serial"]), st.integers(0, 5))
def test_floor_and_critical_path_of_any_boot(plans: list[Plan], order: str, seed: int) -> None:
    timeline = Simulator(plans, order, random.Random(seed)).boot()
    assert timeline.boot_s is not None
    assert tl.from_json(tl.to_json(timeline)) == timeline
    bound = floor(timeline)
    assert bound is not None
    assert bound.floor_s <= timeline.boot_s
    all_pieces = [piece for attempt in timeline.attempts for piece in tl.pieces(attempt, timeline.as_of_s)]
    if not tl.waited_s(all_pieces) and all(attempt.spawned_s == 0 for attempt in timeline.attempts):
        assert bound.floor_s == timeline.boot_s
    links = critical_path(timeline)
    assert sum(link.took_s for link in links) == timeline.boot_s
    assert [link.began_s for link in links] == [0.0, *(link.ended_s for link in links)][: len(links)]
    # Whoever waits here waits for a stage that is there, and a lock changes hands at once.
    assert not any(link.kind is not LinkKind.WORK for link in links)
