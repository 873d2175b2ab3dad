"""Processes that carry a mark in the environment they were started with: a whole tree, however it forked."""

from __future__ import annotations

from pathlib import Path

from stagelaunch.system import tree

MARK = "STAGELAUNCH_SMOKE"


def marked_pids(mark: str) -> tuple[int, ...]:
    """The live processes that were started with ``MARK=mark``, ascending, as far as this user may look.

    Zombies have no environment and are not found; nor is what has overwritten it (a rewritten title).
    """
    living = (process for process in tree.read_table().values() if not process.is_dead)
    return tuple(sorted(process.pid for process in living if tree.carries(process, {MARK: mark})))


def command_of(pid: int) -> str:
    """The command line of a process; its bare name, or a question mark, where there is none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
        return words.decode(errors="replace") or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"
