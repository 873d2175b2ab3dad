"""The command line, as the ``stagelaunch`` script and ``python -m stagelaunch`` run it.

Imports next to nothing: multiprocessing imports the script in each stage, too, and they have no use for a command line.
"""

import _imp
import gc
import os
import signal
import sys

GARBAGE_THRESHOLD = 50_000
"""So many objects more than there were, then it is looked for."""


def main() -> int:
    """Run this process's command line; the exit code to leave with."""
    # Left alone where it is ignored, as some callers leave it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    _leave_if_interrupted_before()
    # What is imported stays: looking for garbage in it, every few hundred objects, takes a tenth of a start.
    gc.set_threshold(GARBAGE_THRESHOLD, *gc.get_threshold()[1:])
    from stagelaunch.cli.main import main as run

    return run()


def _leave_if_interrupted_before() -> None:
    """While the interpreter started, a Ctrl-C can have ended that callback with the import lock taken: no other thread
    could import anything, and whoever waits for one would hang."""
    try:
        _imp.release_lock()
    except RuntimeError:
        # This thread does not hold it: all is well.
        return
    _leave()


def _leave(*_: object) -> None:
    """Ctrl-C, for all that has nothing to put in order. KeyboardInterrupt can get lost: some callbacks swallow it, one
    of the import system among them."""
    try:
        os.write(2, b"stagelaunch: interrupted\n")
    finally:
        # ExitCode.INTERRUPTED, which may not be imported yet.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
