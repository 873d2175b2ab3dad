"""How a stage that runs is asked for its stacks: by a message, and by a signal only if it does not answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from deployments import TIMEOUT_S
from test_forkserver import stage_run

from stagelaunch.core import messages as m
from stagelaunch.supervisor.forkserver import Forked
from stagelaunch.supervisor.stage_process import Listener, StageProcess

ANSWER_S = 0.02
TELLS_EACH_QUIT = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGQUIT])
print("begins", flush=True)
while signal.sigwait([signal.SIGQUIT]):
    print("quit", flush=True)
"""


class NoForkserver:
    """Takes the order and does nothing."""

    forked: Forked

    def start(self, run: object, run_file: Path, forked: Forked) -> None:
        self.forked = forked


@pytest.fixture
def signalled() -> Iterator[subprocess.Popen[bytes]]:
    """A process that tells of each SIGQUIT that it gets."""
    with subprocess.Popen([sys.executable, "-c", TELLS_EACH_QUIT], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


def test_stacks_are_asked_for_by_a_signal_only_if_the_stage_does_not_answer(signalled: subprocess.Popen[bytes]) -> None:
    async def scenario() -> None:
        heard: asyncio.Queue[m.Message] = asyncio.Queue()
        forkserver = NoForkserver()
        listener = Listener(heard.put_nowait, lambda: None, lambda _: None, pytest.fail)
        process = StageProcess(cast(Any, forkserver), stage_run(0), Path("/run.json"), listener)
        assert forkserver.forked.channel is not None
        theirs = forkserver.forked.channel.dup()
        forkserver.forked.on_started(signalled.pid)

        process.dump_stacks(ANSWER_S)
        assert m.decode(theirs.recv(1000)) == m.DumpStacks()
        theirs.sendall(m.encode(m.StacksDumped()) + m.encode(m.Pong(1)))
        assert await heard.get() == m.Pong(1)
        assert heard.empty()
        # Nothing is left that could send a signal later.
        assert process._quit is None

        process.dump_stacks(ANSWER_S)
        # Somebody who asks again, and has time, does not take it from one who has not.
        process.dump_stacks(ANSWER_S * 1000)
        assert signalled.stdout is not None
        assert await asyncio.wait_for(asyncio.to_thread(signalled.stdout.readline), TIMEOUT_S) == b"quit\n"
        theirs.close()
        process._end()
        signalled.kill()
        assert signalled.stdout.read() == b""

    asyncio.run(scenario())
