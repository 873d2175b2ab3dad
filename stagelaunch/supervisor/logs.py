"""The stages' log files as their supervisor minds them: puts aside what has grown too large, and shows what is new.

Every stage writes its own file; nothing here stands between the two. `supervisor.run` owns a ``StageLogs`` for a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from stagelaunch.core import messages as m
from stagelaunch.core.config import Logs
from stagelaunch.core.logs import prefixed, shifts, shown
from stagelaunch.system.log_file import Follower, aside, heading, is_mid_line, size
from stagelaunch.system.regular import open_log

POLL_S = 0.2
ROTATE_EVERY_S = 2.0
LAST_LINES_WAIT_S = 2.0
"""How long a console that takes nothing may hold up the end."""
_BACKLOG_BYTES = 8 << 20
"""A console that is further behind leaves lines out; they are in the files."""


class StageLogs:
    """The logs of a run's stages. ``tell`` sends a message to the process of a stage, if it has one.

    ``show`` prints one line and says whether it did: False when it would have to wait; None: nothing is to be shown.
    """

    def __init__(
        self,
        paths: Mapping[int, tuple[str, Path]],
        limits: Logs,
        tell: Callable[[int, m.Message], None],
        say: Callable[[str], None],
        show: Callable[[str], bool] | None = None,
    ) -> None:
        self._paths = paths
        self._limits = limits
        self._tell = tell
        self._say = say
        self._show = show
        self._width = max((len(name) for name, _ in paths.values()), default=0)
        self._followers = {} if show is None else {i: self._follower(path) for i, (_, path) in paths.items()}
        self._unshown: deque[str] = deque()
        self._headings: set[bytes] = set()
        self._troubles: dict[int, str] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look after the logs until ``close``."""
        self._task = asyncio.create_task(self._mind())

    def begin(self, stage_id: int) -> None:
        """A process of the stage is about to start: its log, which goes on over many, says so. Not the console, which
        hears of it from the supervisor."""
        name, path = self._paths[stage_id]
        line = heading(f"{name} started by supervisor pid {os.getpid()}")
        # A log that cannot be written costs its words; the stage says why.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            end = "\n" if is_mid_line(path) else ""
            with open(open_log(path), "wb", buffering=0) as file:
                file.write(f"{end}{line}\n".encode())
            self._headings.add(line.encode())

    def take_over(self, limits: Logs) -> None:
        """Go on under other limits."""
        self._limits = limits

    def poll(self) -> None:
        """Show what is new, as far as the console takes it."""
        self._print()
        if not self._unshown:
            for stage_id, follower in self._followers.items():
                self._queue(stage_id, follower.poll())
            self._print()

    def rotate(self) -> None:
        """Put aside every log that has grown too large; have every one that is gone made again."""
        for stage_id, (name, path) in self._paths.items():
            if not os.path.lexists(path):
                self._tell(stage_id, m.ReopenLog())
            elif size(path) > self._limits.max_size_bytes:
                try:
                    put_aside(path, self._limits.keep)
                except OSError as error:
                    self._say_once(stage_id, f"{name}: cannot put aside its log {path}: {error.strerror}")
                # Also after half of it: the file that the name means now may be another one.
                self._tell(stage_id, m.ReopenLog())

    def reopen(self) -> None:
        """Have every stage open its log anew by its name: somebody has put the files aside."""
        for stage_id in self._paths:
            self._tell(stage_id, m.ReopenLog())

    async def close(self) -> None:
        """Show the rest, for as long as the console takes it, and let go of the files."""
        if self._task is not None:
            self._task.cancel()
        for stage_id, follower in self._followers.items():
            self._queue(stage_id, follower.finish())
        deadline_s = time.monotonic() + LAST_LINES_WAIT_S
        self._print()
        while self._unshown and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
            self._print()

    async def _mind(self) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(POLL_S)
            self.poll()
            if number % round(ROTATE_EVERY_S / POLL_S) == 0:
                self.rotate()

    def _follower(self, path: Path) -> Follower:
        return Follower(path, backlog_bytes=_BACKLOG_BYTES)

    def _queue(self, stage_id: int, lines: list[bytes]) -> None:
        name = self._paths[stage_id][0]
        self._unshown.extend(prefixed(name, self._width, shown(line)) for line in lines if line not in self._headings)

    def _print(self) -> None:
        while self._show is not None and self._unshown and self._show(self._unshown[0]):
            self._unshown.popleft()

    def _say_once(self, stage_id: int, text: str) -> None:
        if self._troubles.get(stage_id) != text:
            self._troubles[stage_id] = text
            self._say(text)


def put_aside_large(path: Path, limits: Logs) -> None:
    """``put_aside`` for a log that nobody writes to now, if it has grown too large."""
    if size(path) > limits.max_size_bytes:
        put_aside(path, limits.keep)


def put_aside(path: Path, keep: int) -> None:
    """Make room at ``path``; its file goes on as PATH.1, and whoever writes to it writes there. OSError as it comes."""
    numbers = [0]
    for file in path.parent.glob(f"{path.name}.*"):
        with contextlib.suppress(ValueError):
            numbers.append(int(file.name.removeprefix(f"{path.name}.")))
    for number, target in shifts([number for number in numbers if number >= 0], keep):
        if target is None:
            aside(path, number).unlink(missing_ok=True)
        else:
            aside(path, number).rename(aside(path, target))


async def follow_logs(
    paths: Mapping[str, Path], lines: int, ended: asyncio.Event | None
) -> AsyncGenerator[dict[str, str], None]:
    """The last ``lines`` lines of each log, then, unless ``ended`` is None, the new ones until it is set."""
    followers = {name: Follower(path, lines) for name, path in paths.items()}
    try:
        while ended is not None and not ended.is_set():
            for name, follower in followers.items():
                for line in follower.poll():
                    yield {"stage": name, "line": line.decode(errors="replace")}
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), POLL_S)
        for name, follower in followers.items():
            for line in follower.finish():
                yield {"stage": name, "line": line.decode(errors="replace")}
    finally:
        for follower in followers.values():
            follower.close()
