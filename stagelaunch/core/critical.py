"""Why a boot took as long as it did: its critical path, and the floor it could have come to.

Pure functions of a ``core.timeline.Timeline`` whose boot is over. Not a simulation and not a plan: durations are the
measured ones, also where stages have slowed each other down. Used by ``stagelaunch report``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heappop, heappush

from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.core.timeline import Attempt, Hold, Piece, Timeline, end_s, pieces

MOST_READERS = 16
"""Of one device, stages whose shared sections are weighed into the floor: those with most of them."""


class LinkKind(StrEnum):
    """What a link of the critical path is."""

    START = "start"
    """Nothing of the stage runs yet: it is about to be started."""
    WORK = "work"
    HANDOVER = "hand-over"
    """The lock is free and on its way to whoever waits for it."""
    WAIT = "wait"
    """For a lock that no stage of this deployment let go."""


@dataclass(frozen=True)
class Link:
    """One stretch of the critical path. Links follow each other without a gap, from 0 to the end of the boot."""

    kind: LinkKind
    stage: str
    phase: Phase
    began_s: float
    ended_s: float
    after: str = ""
    """What had to be before: the stage that let the lock go or got ready; for WAIT, who held the lock."""

    @property
    def took_s(self) -> float:
        """How long it is."""
        return self.ended_s - self.began_s


@dataclass(frozen=True)
class Floor:
    """The shortest this boot could have been, and what makes it so long."""

    floor_s: float
    stage: str | None = None
    """The stage whose own work takes so long; else it is what may not overlap on a device."""
    device: int | None = None


# The critical path.


def critical_path(timeline: Timeline) -> tuple[Link, ...]:
    """What the end of the boot waited for, from 0 on; empty for a boot that is not over.

    Backwards from the stage that was ready last: through a wait for a lock to whoever let it go, through work to what
    came before in the same process, from its start to the stage that had to be ready before (serial order), to the
    process it replaced, or to the begin.
    """
    if timeline.boot_s is None:
        return ()
    walk = _Walk(timeline)
    last = max((a for a in timeline.of_the_boot if a.ready_s is not None), key=lambda a: a.ready_s or 0.0, default=None)
    return () if last is None else walk.back_from(last)


class _Walk:
    """One walk backwards. Every lock and every process is passed once at most, so it ends."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._attempts = timeline.of_the_boot
        self._pieces = {id(a): pieces(a, timeline.as_of_s) for a in self._attempts}
        self._passed: set[int] = set()
        self._links: list[Link] = []

    def back_from(self, attempt: Attempt) -> tuple[Link, ...]:
        at: tuple[Attempt, float] | None = (attempt, end_s(attempt, self._timeline.as_of_s))
        while at is not None:
            at = self._step(*at)
        return _merged(reversed(self._links))

    def _step(self, attempt: Attempt, at_s: float) -> tuple[Attempt, float] | None:
        """Add the link that ends at this moment; where to go on."""
        piece = next((p for p in reversed(self._pieces[id(attempt)]) if p.began_s < at_s), None)
        if piece is None:
            return self._before_start(attempt)
        if piece.waits_for is None or id(piece.waits_for) in self._passed:
            return self._add(LinkKind.WORK, attempt, piece.phase, piece.began_s, at_s)
        self._passed.add(id(piece.waits_for))
        releaser = self._who_released(attempt, piece.waits_for)
        if releaser is None:
            held_by = "; ".join(piece.waits_for.holders)
            return self._add(LinkKind.WAIT, attempt, piece.phase, piece.began_s, at_s, held_by)
        other, released_s = releaser
        self._add(LinkKind.HANDOVER, attempt, piece.phase, released_s, at_s, other.stage)
        return releaser

    def _before_start(self, attempt: Attempt) -> tuple[Attempt, float] | None:
        before = self._predecessor(attempt)
        if before is None:
            self._add(LinkKind.START, attempt, Phase.SPAWN, 0.0, attempt.spawned_s)
            return None
        other, over_s = before
        self._add(LinkKind.START, attempt, Phase.SPAWN, over_s, attempt.spawned_s, other.stage)
        return before

    def _predecessor(self, attempt: Attempt) -> tuple[Attempt, float] | None:
        """The process that this one replaced, or the stage that was to be ready before it."""
        if id(attempt) in self._passed:
            return None
        self._passed.add(id(attempt))
        earlier = [a for a in self._attempts if a.stage_id == attempt.stage_id and a.spawned_s < attempt.spawned_s]
        if earlier:
            return earlier[-1], min(_over_s(earlier[-1]), attempt.spawned_s)
        group = next((group for group in self._timeline.groups if attempt.stage_id in group), ())
        before = group[: group.index(attempt.stage_id)] if self._timeline.order == "serial" else ()
        ready = [(a, a.ready_s) for a in self._attempts if a.stage_id in before and a.ready_s is not None]
        in_time = [(a, ready_s) for a, ready_s in ready if ready_s <= attempt.spawned_s]
        return max(in_time, key=lambda found: found[1], default=None)

    def _who_released(self, waiter: Attempt, wait: Hold) -> tuple[Attempt, float] | None:
        """The last to let go of a lock that kept this one waiting; None where it never got it."""
        if wait.taken_s is None:
            return None
        found = [
            (other, released_s)
            for other in self._attempts
            if other.device == waiter.device and other is not waiter
            for mode, released_s in _releases(other, self._pieces[id(other)])
            if LockMode.EXCLUSIVE in (mode, wait.mode) and wait.asked_s < released_s <= wait.taken_s
        ]
        return max(found, key=lambda each: each[1], default=None)

    def _add(
        self, kind: LinkKind, attempt: Attempt, phase: Phase, began_s: float, ended_s: float, after: str = ""
    ) -> tuple[Attempt, float]:
        if ended_s > began_s:
            self._links.append(Link(kind, attempt.stage, phase, began_s, ended_s, after))
        return attempt, began_s


def _releases(attempt: Attempt, parts: Iterable[Piece]) -> Iterable[tuple[LockMode, float]]:
    return ((piece.mode, piece.ended_s) for piece in parts if piece.mode is not LockMode.NONE)


def _over_s(attempt: Attempt) -> float:
    times = (attempt.ended_s, attempt.failed_s, attempt.ready_s)
    return next((time_s for time_s in times if time_s is not None), attempt.spawned_s)


def _merged(links: Iterable[Link]) -> tuple[Link, ...]:
    """Work of one phase is one link, whatever locks it was done under."""
    found: list[Link] = []
    for link in links:
        last = found[-1] if found else None
        same = last is not None and (last.kind, last.stage, last.phase) == (link.kind, link.stage, link.phase)
        if last is not None and same and link.kind is LinkKind.WORK:
            found[-1] = replace(last, ended_s=link.ended_s)
        else:
            found.append(link)
    return tuple(found)


# The floor.


@dataclass(frozen=True)
class Section:
    """A stretch under a device lock: what of the same stage must be before it, its length, what must come after."""

    head_s: float
    took_s: float
    tail_s: float
    mode: LockMode
    device: int


def floor(timeline: Timeline) -> Floor | None:
    """The same work with perfect overlap, and without a wait; None for a boot that is not over.

    A lower bound on every schedule of the measured pieces, in which (1) the pieces of a stage, all its processes of
    this boot included, follow each other, without the waits for locks; (2) on one device an exclusive section overlaps
    no other section, exclusive or shared; (3) everything else may overlap, and every stage may start at 0. It is the
    largest of:

    - for each stage, the sum of its pieces;
    - for each device, and each stage on it, how long the exclusive sections of all stages and the shared sections of
      that one stage take on a machine that does one thing at a time, where a section is there only once what precedes
      it in its stage is done, and is followed by what comes after it there. No two of these may overlap, so this holds
      whichever stage is chosen. Preemption is allowed (Jackson's rule: the longest tail first), which makes it exact to
      compute and only lower.

    So it is never above what the boot took, and equals that where no stage waited and all started at 0.
    """
    if timeline.boot_s is None:
        return None
    chains = _chains(timeline)
    own = [Floor(sum(piece.took_s for piece in chain), stage=stage) for stage, chain in chains.items()]
    sections = {stage: _sections(chain, device) for (stage, chain), device in zip(chains.items(), _devices(timeline))}
    found = max([Floor(0.0), *own, *_by_device(sections)], key=lambda each: each.floor_s)
    # Also where a stage did not keep to the locks, and what may not overlap did.
    return replace(found, floor_s=min(found.floor_s, timeline.boot_s))


def _chains(timeline: Timeline) -> dict[str, tuple[Piece, ...]]:
    """The work of each stage, in order."""
    found: dict[str, tuple[Piece, ...]] = {}
    for attempt in timeline.of_the_boot:
        work = tuple(piece for piece in pieces(attempt, timeline.as_of_s) if piece.waits_for is None)
        found[attempt.stage] = (*found.get(attempt.stage, ()), *work)
    return found


def _devices(timeline: Timeline) -> list[int]:
    """The device of each stage, in the order of `_chains`."""
    return list({attempt.stage: attempt.device for attempt in timeline.of_the_boot}.values())


def _sections(chain: Sequence[Piece], device: int) -> list[Section]:
    total_s, done_s, found = sum(piece.took_s for piece in chain), 0.0, []
    for piece in chain:
        if piece.mode is not LockMode.NONE:
            tail_s = total_s - done_s - piece.took_s
            found.append(Section(done_s, piece.took_s, tail_s, piece.mode, device))
        done_s += piece.took_s
    return found


def _by_device(sections: dict[str, list[Section]]) -> Iterable[Floor]:
    everything = [section for found in sections.values() for section in found]
    for device in sorted({section.device for section in everything}):
        exclusive = [s for s in everything if s.device == device and s.mode is LockMode.EXCLUSIVE]
        shared = [[s for s in found if s.device == device and s.mode is LockMode.SHARED] for found in sections.values()]
        shared.sort(key=lambda found: -sum(section.took_s for section in found))
        bound_s = max(one_at_a_time_s([*exclusive, *readers]) for readers in shared[:MOST_READERS])
        yield Floor(bound_s, device=device)


def one_at_a_time_s(sections: Sequence[Section]) -> float:
    """When all of it can be over, tails included, where one section is worked on at a time and may be interrupted."""
    ahead = sorted(sections, key=lambda section: section.head_s)
    ready: list[tuple[float, float]] = []
    now_s = over_s = 0.0
    position = 0
    while position < len(ahead) or ready:
        if not ready:
            now_s = max(now_s, ahead[position].head_s)
        while position < len(ahead) and ahead[position].head_s <= now_s:
            heappush(ready, (-ahead[position].tail_s, ahead[position].took_s))
            position += 1
        tail, left_s = heappop(ready)
        until_s = ahead[position].head_s if position < len(ahead) else float("inf")
        worked_s = min(left_s, until_s - now_s)
        now_s += worked_s
        if worked_s < left_s:
            heappush(ready, (tail, left_s - worked_s))
        else:
            over_s = max(over_s, now_s - tail)
    return over_s
