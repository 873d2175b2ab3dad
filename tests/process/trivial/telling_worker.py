"""What stands in for ``stagelaunch.worker.main``: says what it is, and ends as it is told to."""

import contextlib
import gc
import json
import os
import signal
import sys
from pathlib import Path


def run(run_file, stage_id, channel):
    body = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "environment": dict(os.environ),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "channel": channel.fileno(),
        "frozen": gc.get_freeze_count(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "run_file": run_file,
        "stage_id": stage_id,
        "timeout": channel.gettimeout(),
        "on_child": signal.getsignal(signal.SIGCHLD),
        "wave_is_imported": "wave" in sys.modules,
    }
    with contextlib.suppress(ValueError):
        sys.stdout.flush()
    channel.sendall(json.dumps(body).encode())
    match channel.recv(100).split():
        case [b"exit", code]:
            os._exit(int(code))
        case [b"kill", number]:
            os.kill(os.getpid(), int(number))
        case _:
            signal.pause()
