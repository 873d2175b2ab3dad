"""Probes of a stage: whoever asked may be gone."""

from __future__ import annotations

import asyncio

import pytest

from stagelaunch.core import messages as m
from stagelaunch.supervisor.stage import Stage

ANSWER = m.Probed(1, 1, True, 0.0, (1,), 0.1)


def test_an_answer_that_nobody_waits_for_harms_nothing() -> None:
    async def scenario() -> None:
        stage = Stage(None)  # type: ignore[arg-type]
        stage.probes[1] = gone = asyncio.get_running_loop().create_future()
        gone.cancel()
        stage.end_probe(1, ANSWER)
        assert stage.probes == {}
        # It comes once more, or too late.
        stage.end_probe(1, ANSWER)
        stage.end_probe(2, TimeoutError())

    asyncio.run(scenario())


def test_a_probe_ends_with_its_answer_or_with_its_time() -> None:
    async def scenario() -> None:
        stage, loop = Stage(None), asyncio.get_running_loop()  # type: ignore[arg-type]
        stage.probes = {1: loop.create_future(), 2: loop.create_future()}
        answered, late = stage.probes[1], stage.probes[2]
        stage.end_probe(1, ANSWER)
        stage.end_probe(2, TimeoutError())
        assert await answered == ANSWER
        with pytest.raises(TimeoutError):
            await late

    asyncio.run(scenario())
