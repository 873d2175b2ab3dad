"""A look that never ends: nobody waits for it longer than he said, nor does the end of the loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagelaunch.core.errors import CheckpointError
from stagelaunch.supervisor import admission
from stagelaunch.supervisor import session as session_module
from stagelaunch.supervisor.look import Looks
from stagelaunch.supervisor.session import Session


def test_one_look_that_hangs_is_shared_and_given_up_and_not_waited_for_at_the_end() -> None:
    let_go, began = threading.Event(), []

    def hang() -> None:
        began.append(threading.current_thread())
        let_go.wait(60)

    async def scenario() -> None:
        looks = Looks()
        for _ in range(50):
            with pytest.raises(TimeoutError):
                await looks.take("talker", hang, 0.001)
        # Others get theirs.
        await looks.take("thinker", lambda: None, 60)

    asyncio.run(scenario())
    (thread,) = began
    assert thread.is_alive()
    let_go.set()
    thread.join(60)


def test_a_look_returns_or_raises_to_all_who_asked_and_the_next_one_looks_again() -> None:
    gate, count = threading.Event(), 0

    def fail() -> None:
        nonlocal count
        count += 1
        gate.wait(60)
        raise ValueError("changed")

    async def scenario() -> list[BaseException | None]:
        looks = Looks()
        asked = [asyncio.create_task(looks.take(1, fail, 60)) for _ in range(3)]
        await asyncio.sleep(0)
        # One who goes away takes nothing from the others.
        asked.pop().cancel()
        gate.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(ValueError, match="changed"):
            await looks.take(1, fail, 60)
        return found

    assert [str(error) for error in asyncio.run(scenario())] == ["changed", "changed"]
    assert count == 2


def test_a_restart_is_refused_while_the_disk_of_its_weights_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(session_module, "require_unchanged", lambda stamps: let_go.wait(60))
    monkeypatch.setattr(session_module, "WEIGHTS_LOOK_S", 0.01)
    session = cast(Any, Session.__new__(Session))
    session._deployment = SimpleNamespace(stages=[SimpleNamespace(id=3, name="talker")])
    session._admitted = SimpleNamespace(weight_plans={3: SimpleNamespace(stamps={})})
    session._looks = Looks()
    session._supervisor = SimpleNamespace(request_restart=pytest.fail)
    refusal = asyncio.run(session._request_restart("talker"))
    assert "the disk does not answer within 0.01s; the stage runs on" in refusal
    let_go.set()


def test_a_boot_from_a_disk_that_does_not_answer_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(admission, "check_checkpoint", lambda _: let_go.wait(60))
    loaded = SimpleNamespace(deployment=SimpleNamespace(timeouts=SimpleNamespace(boot_s=0.05)), model_dir="/models/x")
    loaded.with_model_as_it_is = lambda: loaded
    with pytest.raises(
        CheckpointError, match=r"/models/x: cannot be looked at: the disk does not answer within 0\.05s"
    ):
        asyncio.run(admission._look_at_checkpoint(cast(Any, loaded)))
    assert not let_go.is_set()
    let_go.set()
