"""SIGINT and SIGTERM for a command that must end in good order: the first one ends what waits, all are counted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818  (as KeyboardInterrupt: not an error)
    """The user, or the runner, wants it to end."""


class Interrupts:
    """While entered, signals do nothing but raise ``Interrupted`` inside ``armed``, once; see ``count``."""

    def __init__(self) -> None:
        self.count = 0
        self.first_at_s: float | None = None
        """Monotonic time of the first."""
        self._armed = False
        self._before: list[Callable[[int, FrameType | None], Any] | int | None] = []

    def __enter__(self) -> Interrupts:
        self._before = [signal.signal(number, self._handle) for number in _NUMBERS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(_NUMBERS, self._before):
            signal.signal(number, handler)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """A signal in the body, or one that came before, raises Interrupted."""
        self._armed = True
        try:
            if self.count:
                raise Interrupted
            yield
        finally:
            self._armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.first_at_s is None:
            self.first_at_s = time.monotonic()
        if self._armed:
            self._armed = False
            raise Interrupted
