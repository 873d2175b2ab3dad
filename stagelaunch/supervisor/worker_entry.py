"""The first lines of a stage's process. Imports next to nothing, so that they are reached at once.

Until the parent-death signal is armed only the warden would end a stage whose supervisor dies; nobody, if both do.
"""

from __future__ import annotations

import socket
from importlib import import_module

from stagelaunch.system.process import die_with_parent


def enter_worker(run_file: str, stage_id: int, supervisor_pid: int, channel: socket.socket) -> None:
    """Be a worker. By name, so that the supervisor never imports what a worker needs."""
    die_with_parent(supervisor_pid)
    import_module("stagelaunch.worker.main").run(run_file, stage_id, supervisor_pid, channel)
