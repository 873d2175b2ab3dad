"""A supervisor in a process of its own: started, and listened to through a pipe. For ``up --detach`` and ``smoke``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stagelaunch.supervisor.runtime import Runtime, writable
from stagelaunch.system.process import die_with_parent
from stagelaunch.system.regular import open_log


def start_in_background(
    runtime: Runtime,
    config: str,
    runtime_dir: Path | None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    tied: bool = False,
) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the descriptor on which it tells what happens, one JSON object a line.

    In a session of its own, so that a Ctrl-C here does not reach it; what it says goes to the supervisor's log.
    ``tied``: it stops in good order when the thread that called this ends, however it ends. ConfigError where that log
    cannot be opened.
    """
    runtime.create()
    read_fd, write_fd = os.pipe()
    caller = os.getpid()

    def tie() -> None:
        # It becomes the warden, to whom SIGTERM is a request to stop.
        die_with_parent(caller, signal.SIGTERM)

    command = [sys.executable, "-m", "stagelaunch", "up", "--notify-fd", str(write_fd), *options]
    if runtime_dir is not None:
        command += ["--runtime-dir", str(runtime_dir.absolute())]
    command += ["--", config]
    try:
        with writable(runtime.directory):
            log_file = os.fdopen(open_log(runtime.supervisor_log), "ab")
        with log_file as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                start_new_session=True,
                env=environment,
                preexec_fn=tie if tied else None,
            )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return process, read_fd
