"""A boot's timeline as one page for people, and as JSON with everything that page says.

Decides nothing but what is worth advising. Used by ``stagelaunch report``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from stagelaunch.core.critical import Floor, Link, LinkKind, critical_path, floor
from stagelaunch.core.phases import BOOT_PHASES, Phase
from stagelaunch.core.table import table
from stagelaunch.core.timeline import VERSION, Attempt, PhaseRecord, Piece, Timeline, end_s, pieces, to_json, waited_s
from stagelaunch.core.units import format_duration, format_size

BAR_CHARS = 72
NOTICEABLE = 0.1
"""Of the whole boot: what is less is not worth advice."""
NEAR_FLOOR = 1.15
SHOWN_S = 0.01

_LETTERS = {Phase.SPAWN: "s", Phase.IMPORT: "i", Phase.CONTEXT: "x", Phase.LOAD: "L", Phase.PROFILE: "P",
            Phase.SIZE: "z", Phase.ALLOCATE: "a", Phase.CAPTURE: "C"}  # fmt: skip
_WAIT_CHAR = "."


def render(timeline: Timeline) -> str:
    """One page: the boot as a chart, what each phase took, what it waited for, and what would make it shorter."""
    blocks = [_head(timeline), _chart(timeline), _phases(timeline.of_the_boot, timeline.as_of_s)]
    if timeline.restarts:
        blocks.append("started again after the boot\n" + _phases(timeline.restarts, timeline.as_of_s))
    bound = floor(timeline)
    if bound is not None:
        links = critical_path(timeline)
        blocks += [_path(links), _summary(timeline, bound, links)]
    return "\n\n".join(blocks)


def report_json(timeline: Timeline) -> dict[str, Any]:
    """Everything the page says, sizes in bytes and times in seconds since the boot began."""
    bound, links = floor(timeline), critical_path(timeline)
    return {
        "version": VERSION,
        **{key: value for key, value in to_json(timeline).items() if key not in ("version", "attempts")},
        "floor_s": None if bound is None else bound.floor_s,
        "floor_of": None if bound is None else _whose(bound),
        "ratio": _ratio(timeline, bound),
        "stages": [_attempt_json(attempt, timeline.as_of_s) for attempt in timeline.attempts],
        "critical_path": [
            {"kind": link.kind, "stage": link.stage, "phase": link.phase, "began_s": link.began_s,
             "took_s": link.took_s, "after": link.after or None}
            for link in links
        ],
        "advice": None if bound is None else advice(timeline, bound, links),
    }  # fmt: skip


def _attempt_json(attempt: Attempt, as_of_s: float) -> dict[str, Any]:
    keys = ("stage_id", "stage", "device", "pid", "spawned_s", "ready_s", "failed_s", "ended_s", "how")
    return {
        **{key: getattr(attempt, key) for key in keys},
        "phases": [
            {"phase": record.phase, "began_s": parts[0].began_s, "took_s": _took(record, parts),
             "waited_s": waited_s(parts), "bytes": record.done_bytes,
             "waits": [
                 {"mode": piece.waits_for.mode, "began_s": piece.began_s, "took_s": piece.took_s,
                  "holders": list(piece.waits_for.holders)}
                 for piece in parts if piece.waits_for is not None
             ]}
            for record, parts in _by_phase(attempt, as_of_s)
        ],
    }  # fmt: skip


def _by_phase(attempt: Attempt, as_of_s: float) -> list[tuple[PhaseRecord, list[Piece]]]:
    """Each phase that took any time, with its pieces."""
    parts = pieces(attempt, as_of_s)
    found = [(record, [piece for piece in parts if piece.phase is record.phase]) for record in attempt.phases]
    return [(record, own) for record, own in found if own]


def _took(record: PhaseRecord, parts: Sequence[Piece]) -> float:
    return (parts[-1].ended_s if record.ended_s is None else record.ended_s) - record.began_s


# The page.


def _head(timeline: Timeline) -> str:
    when = datetime.fromtimestamp(timeline.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if timeline.boot_s is not None:
        how = f"booted in {format_duration(timeline.boot_s)}"
    else:
        how = f"{timeline.state}, not booted, as of {format_duration(timeline.as_of_s)}"
    failed = f"\n{timeline.failure}" if timeline.failure else ""
    return f"{timeline.deployment}: {how}, {timeline.order} order, started {when}{failed}"


def _chart(timeline: Timeline) -> str:
    """A bar for each process of the boot; each column is what most of it was spent with."""
    whole_s = timeline.boot_s or max((end_s(a, timeline.as_of_s) for a in timeline.of_the_boot), default=0.0)
    width = max((len(attempt.stage) for attempt in timeline.of_the_boot), default=0)
    legend = ", ".join(f"{_LETTERS[phase]} {phase}" for phase in BOOT_PHASES)
    lines = [f"{' ' * width} 0{format_duration(whole_s).rjust(BAR_CHARS)}"]
    for attempt in timeline.of_the_boot:
        lines.append(f"{attempt.stage.ljust(width)} |{_bar(pieces(attempt, timeline.as_of_s), whole_s)}|")
    return "\n".join([*lines, f"{' ' * width} {legend}, {_WAIT_CHAR} waits for the device lock"])


def _bar(parts: Sequence[Piece], whole_s: float) -> str:
    column_s = whole_s / BAR_CHARS or 1.0
    shares: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(BAR_CHARS)]
    for piece in parts:
        char = _LETTERS[piece.phase] if piece.waits_for is None else _WAIT_CHAR
        first, last = (int(min(time_s / column_s, BAR_CHARS)) for time_s in (piece.began_s, piece.ended_s))
        for column in range(first, min(last + 1, BAR_CHARS)):
            began_s, ended_s = column * column_s, (column + 1) * column_s
            shares[column][char] += max(0.0, min(piece.ended_s, ended_s) - max(piece.began_s, began_s))
    return "".join(max(share, key=share.__getitem__) if any(share.values()) else " " for share in shares)


def _phases(attempts: Iterable[Attempt], as_of_s: float) -> str:
    rows = [("stage", "device", "phase", "start", "took", "waited", "read", "rate")]
    for attempt in attempts:
        name, device = attempt.stage, str(attempt.device)
        for record, parts in _by_phase(attempt, as_of_s):
            start = format_duration(parts[0].began_s)
            rows.append((name, device, record.phase, start, *_figures(record, parts)))
            name = device = ""
        rows += [("", "", how, format_duration(at_s), "", "", "", "") for how, at_s in _end(attempt)]
    return "\n".join(table(rows, right=(1, 3, 4, 5, 6, 7)))


def _figures(record: PhaseRecord, parts: Sequence[Piece]) -> tuple[str, str, str, str]:
    took_s, waits_s = _took(record, parts), waited_s(parts)
    waited = format_duration(waits_s) if waits_s >= SHOWN_S else ""
    if not record.done_bytes:
        return format_duration(took_s), waited, "", ""
    rate = f"{format_size(int(record.done_bytes / max(took_s - waits_s, 1e-6)))}/s"
    return format_duration(took_s), waited, format_size(record.done_bytes), rate


def _end(attempt: Attempt) -> list[tuple[str, float]]:
    if attempt.ready_s is not None:
        return [("ready", attempt.ready_s)]
    if attempt.failed_s is not None:
        return [("failed", attempt.failed_s)]
    return [] if attempt.ended_s is None else [(f"ended ({attempt.how})", attempt.ended_s)]


def _path(links: Sequence[Link]) -> str:
    shown = [link for link in links if link.took_s >= SHOWN_S or link.kind is LinkKind.HANDOVER]
    rows = [(format_duration(link.began_s), format_duration(link.took_s), link.stage, _said(link)) for link in shown]
    head = "critical path (but for what took less than 10 ms)"
    return "\n".join([head, *table([("at", "took", "stage", "what"), *rows], right=(0, 1), indent=2)])


def _said(link: Link) -> str:
    match link.kind:
        case LinkKind.START:
            return f"is started, after {link.after}" if link.after else "is started"
        case LinkKind.HANDOVER:
            return f"{link.phase}: takes over the device lock from {link.after}"
        case LinkKind.WAIT:
            return f"{link.phase}: waits for the device lock, held by {link.after or 'nobody on record'}"
        case _:
            return str(link.phase)


def _summary(timeline: Timeline, bound: Floor, links: Sequence[Link]) -> str:
    assert timeline.boot_s is not None
    ratio = _ratio(timeline, bound)
    lines = [
        f"boot {format_duration(timeline.boot_s)}, floor {format_duration(bound.floor_s)} ({_whose(bound)})"
        + (f", {ratio:.2f} of it" if ratio is not None else "")
    ]
    found = advice(timeline, bound, links)
    return "\n".join(lines if found is None else [*lines, f"to come nearer: {found}"])


def _ratio(timeline: Timeline, bound: Floor | None) -> float | None:
    if bound is None or timeline.boot_s is None or bound.floor_s <= 0:
        return None
    return timeline.boot_s / bound.floor_s


def _whose(bound: Floor) -> str:
    if bound.stage is not None:
        return f"the own work of {bound.stage}"
    return f"what cannot overlap on device {bound.device}"


# Advice.

_HINTS = {
    Phase.IMPORT: "its libraries; nothing of the deployment changes that",
    Phase.LOAD: "reading its weights; keep them in the page cache, or on a faster disk",
    Phase.PROFILE: "its largest batch; a lower max_num_batched_tokens or a warm compile cache shortens it",
    Phase.CAPTURE: "capturing its graphs; fewer sizes shorten it",
}


def advice(timeline: Timeline, bound: Floor, links: Sequence[Link]) -> str | None:
    """The one thing to change that sticks out; None where nothing does."""
    whole_s = timeline.boot_s or 0.0
    near = whole_s <= NEAR_FLOOR * bound.floor_s
    waits = [link for link in links if link.kind is LinkKind.WAIT]
    started = Counter(attempt.stage for attempt in timeline.of_the_boot)
    again = [stage for stage, times in started.items() if times > 1]
    if timeline.order == "serial" and not near:
        return (
            f"order: overlap lets stages that share a device boot together ({format_duration(bound.floor_s)} at best)"
        )
    if sum(link.took_s for link in waits) > NOTICEABLE * whole_s:
        longest = max(waits, key=lambda link: link.took_s)
        who = longest.after or "a process that left no record"
        return f"{longest.stage} waited {format_duration(longest.took_s)} for a device lock held by {who}"
    if again:
        return f"{', '.join(again)} was started more than once; see why in its log"
    return _longest_phase(links, whole_s)


def _longest_phase(links: Sequence[Link], whole_s: float) -> str | None:
    took: defaultdict[tuple[str, Phase], float] = defaultdict(float)
    for link in links:
        if link.kind is LinkKind.WORK:
            took[link.stage, link.phase] += link.took_s
    if not took:
        return None
    (stage, phase), took_s = max(took.items(), key=lambda each: each[1])
    if phase not in _HINTS or took_s < 0.4 * whole_s:
        return None
    return f"{stage} spends {format_duration(took_s)} of the critical path in {phase}: {_HINTS[phase]}"
