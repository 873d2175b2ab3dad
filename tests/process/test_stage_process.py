"""How a stage that runs is asked for its stacks: by a message, and by a signal only if it does not answer."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from test_forkserver import stage_run

from stagelaunch.core import messages as m
from stagelaunch.supervisor.forkserver import Forked
from stagelaunch.supervisor.stage_process import Listener, StageProcess

ANSWER_S = 0.02
BLOCKS_QUIT = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGQUIT]); print(); input()"


class NoForkserver:
    """Takes the order and does nothing."""

    forked: Forked

    def start(self, run: object, run_file: Path, forked: Forked) -> None:
        self.forked = forked


@pytest.fixture
def deaf() -> Iterator[subprocess.Popen[bytes]]:
    """A process in which SIGQUIT stays pending."""
    with subprocess.Popen([sys.executable, "-c", BLOCKS_QUIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


def has_pending_quit(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd"))
    return bool(pending >> (signal.SIGQUIT - 1) & 1)


def test_stacks_are_asked_for_by_a_signal_only_if_the_stage_does_not_answer(deaf: subprocess.Popen[bytes]) -> None:
    async def scenario() -> None:
        heard: asyncio.Queue[m.Message] = asyncio.Queue()
        forkserver = NoForkserver()
        listener = Listener(heard.put_nowait, lambda: None, lambda _: None, pytest.fail)
        process = StageProcess(cast(Any, forkserver), stage_run(0), Path("/run.json"), listener)
        assert forkserver.forked.channel is not None
        theirs = forkserver.forked.channel.dup()
        forkserver.forked.on_started(deaf.pid)

        process.dump_stacks(ANSWER_S)
        assert m.decode(theirs.recv(1000)) == m.DumpStacks()
        theirs.sendall(m.encode(m.StacksDumped()) + m.encode(m.Pong(1)))
        assert await heard.get() == m.Pong(1)
        # Timers fire in order: the signal's would have been first.
        await asyncio.sleep(ANSWER_S * 2)
        assert not has_pending_quit(deaf.pid)
        assert heard.empty()

        process.dump_stacks(ANSWER_S)
        # Somebody who asks again, and has time, does not take it from one who has not.
        process.dump_stacks(ANSWER_S * 1000)
        await asyncio.sleep(ANSWER_S * 2)
        assert has_pending_quit(deaf.pid)
        theirs.close()
        process._end()

    asyncio.run(scenario())
