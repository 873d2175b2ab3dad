"""SIGQUIT to a process that keeps a loop: while it runs, and when it is closed and the last words are said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ASKED = """
import asyncio, os, signal, sys
from pathlib import Path
from stagelaunch.supervisor.stacks import dump_threads_on_quit

async def run():
    dumped = asyncio.Event()
    for _ in range(2):
        dump_threads_on_quit(Path(sys.argv[1]), dumped.set)
    os.kill(os.getpid(), signal.SIGQUIT)
    await dumped.wait()

asyncio.run(run())
os.kill(os.getpid(), signal.SIGQUIT)
print("last words")
"""


def test_quit_writes_stacks_and_ends_nobody_also_when_the_loop_is_closed(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks.log"
    done = subprocess.run([sys.executable, "-c", ASKED, str(stacks)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "last words\n", "")
    # In the loop from C and by it, and once more from C.
    assert stacks.read_text().count("(most recent call first)") == 3
