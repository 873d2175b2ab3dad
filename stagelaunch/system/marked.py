"""Processes that carry a mark in the environment they were started with: a whole tree, however it forked."""

from __future__ import annotations

import os
from pathlib import Path

MARK = "STAGELAUNCH_SMOKE"


def marked_pids(mark: str) -> tuple[int, ...]:
    """The live processes that were started with ``MARK=mark``, ascending, as far as this user may look.

    Zombies have no environment and are not found; nor is what has overwritten it (a rewritten title).
    """
    wanted = f"{MARK}={mark}".encode()
    return tuple(sorted(pid for pid in _all_pids() if wanted in _environment(pid)))


def command_of(pid: int) -> str:
    """The command line of a process; its bare name, or a question mark, where there is none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
        return words.decode(errors="replace") or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
