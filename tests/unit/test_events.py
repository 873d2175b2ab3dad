"""Messages of a worker as events for programs; the keeping of them, bounded, for any number of followers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from stagelaunch.core import board, events
from stagelaunch.core import messages as m
from stagelaunch.core.events import EventKind, News
from stagelaunch.core.failure import StageFailure
from stagelaunch.core.ledger import Ledger, Source, Term
from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.supervisor.events import EventLog

TERM = Term(7, Source.MEASURED)
LEDGER = Ledger(TERM, TERM, TERM, TERM, TERM, TERM, TERM, TERM, 5, 3, 4, held_bytes=9)


def derive(*messages: m.Message) -> list[dict[str, Any]]:
    view = board.spawned(0, "alpha", 10.0)
    found: list[News] = []
    for message in messages:
        before, view = view, board.apply(view, message)
        found += events.of_message(before, view, message, 4711)
    assert {(news.stage, news.pid) for news in found} <= {("alpha", 4711)}
    return [{"event": news.event, **news.more} for news in found]


def test_each_transition_is_an_event_with_what_it_took() -> None:
    said = derive(
        m.PhaseBegan(Phase.IMPORT, 12.0),
        m.PhaseEnded(Phase.IMPORT, 13.5, 0.5),
        m.PhaseBegan(Phase.LOAD, 13.5),
        m.LedgerKnown(LEDGER, False),
        m.LedgerKnown(LEDGER, True),
        m.LogLost("no room"),
        m.Ready(20.0),
    )
    assert said == [
        {"event": "phase", "phase": "import", "previous": "spawn", "took_s": 2.0, "waited_s": 0.0},
        {"event": "phase", "phase": "load", "previous": "import", "took_s": 1.5, "waited_s": 0.5},
        {"event": "sized", "num_blocks": 5, "budget_bytes": 7},
        {"event": "log_lost", "text": "no room"},
        {"event": "ready", "boot_s": 10.0, "took_s": 1.5, "waited_s": 0.5},
    ]


def test_a_wait_is_said_again_only_when_somebody_else_is_in_the_way() -> None:
    mode = LockMode.SHARED
    waits = [m.LockWaits(Phase.LOAD, mode, holders, 1.0) for holders in ((), (), ("pid 1",), ("pid 1",))]
    said = derive(*waits, m.LockTaken(Phase.LOAD, mode, 0.5, 2.0))
    assert [event.get("holders") for event in said] == [[], ["pid 1"], None]
    assert said[-1] == {"event": "lock_taken", "phase": "load", "mode": "shared", "waited_s": 0.5}


def test_progress_is_an_event_at_most_once_a_second() -> None:
    times = [12.1, 12.9, 13.0, 13.1, 13.9, 14.5, 14.6]
    began = m.PhaseBegan(Phase.LOAD, 12.0)
    said = derive(began, *(m.Progress(Phase.LOAD, i, 9, "bytes", at_s) for i, at_s in enumerate(times)))
    assert [event["done"] for event in said[1:]] == [2, 5]


def test_a_failure_names_its_kind_its_phase_and_its_first_line() -> None:
    failure = StageFailure("alpha", Phase.LOAD, "OSError", "no file\nat all", 1.0, pid=4711)
    expected = News(EventKind.FAILED, "alpha", 4711, {"kind": "OSError", "phase": "load", "text": "no file"})
    assert events.of_failure(failure) == expected
    assert events.of_failure(replace(failure, stage=None, pid=None)).stage is None


async def collect(log: EventLog, *, wait: bool) -> list[dict[str, Any]]:
    return [record async for record in log.follow(wait=wait)]


def test_every_follower_hears_everything_until_the_log_is_closed() -> None:
    async def scenario() -> None:
        log = EventLog()
        log.add(News(EventKind.BOOTING))
        late = asyncio.create_task(collect(log, wait=True))
        await asyncio.sleep(0)
        log.add(News(EventKind.STARTED, "alpha", 1, {"device": 0}))
        so_far = await collect(log, wait=False)
        log.add(News(EventKind.ENDED))
        log.close()
        heard = await late
        assert [(record["seq"], record["event"]) for record in heard] == [(1, "booting"), (2, "started"), (3, "ended")]
        assert so_far == heard[:2]
        assert set(heard[0]) == {"seq", "at", "elapsed_s", "event"}
        assert heard[1] | {"stage": "alpha", "pid": 1, "device": 0} == heard[1]

    asyncio.run(scenario())


@pytest.mark.parametrize(("added", "lost"), [(5, None), (8, 3)])
def test_what_is_not_kept_any_more_is_counted(added: int, lost: int | None) -> None:
    async def scenario() -> list[dict[str, Any]]:
        log = EventLog(capacity=5)
        for _ in range(added):
            log.add(News(EventKind.PROGRESS))
        log.close()
        return await collect(log, wait=True)

    heard = asyncio.run(scenario())
    if lost is not None:
        assert heard.pop(0) == {"event": "lost", "count": lost}
    assert [record["seq"] for record in heard] == list(range(added - 4, added + 1))
