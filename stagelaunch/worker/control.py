"""Hears the supervisor, in a thread of its own, from before the boot to the end: pings, logs, stacks, requests.

The thread answers pings while the stage boots, so that a long import or load is no silence; once the stage is ready
only its main loop does, so that one that hangs is silent. It touches no device. Used by `worker.main`.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

from stagelaunch.core import messages as m
from stagelaunch.worker.output import Output
from stagelaunch.worker.reporter import Reporter


class Control:
    """The worker's ear."""

    def __init__(self, channel: socket.socket, reporter: Reporter, output: Output) -> None:
        self._channel = channel
        self._reporter = reporter
        self._output = output
        self._for_main_loop: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()
        self._main_loop_answers = False

    def start(self) -> None:
        """Listen from now on."""
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def requests(self) -> Iterator[m.Message]:
        """What the main loop is asked until the supervisor closes its end. From now on pings are answered here."""
        self._main_loop_answers = True
        while (message := self._for_main_loop.get()) is not None:
            if isinstance(message, m.Ping):
                self._pong(message)
            else:
                yield message

    def _listen(self) -> None:
        try:
            # A supervisor that is gone is no error here: the kernel signals its death.
            with suppress(ConnectionResetError), self._channel.makefile("rb") as lines:
                for line in lines:
                    # What is no message is from another time; the stage goes on.
                    with suppress(ValueError):
                        self._take(m.decode(line))
        finally:
            self._for_main_loop.put(None)

    def _take(self, message: m.Message) -> None:
        match message:
            case m.ReopenLog():
                self._output.reopen()
            case m.DumpStacks():
                self._output.dump_stacks()
                self._reporter.send(m.StacksDumped())
            case m.Ping() if not self._main_loop_answers:
                self._pong(message)
            case _:
                self._for_main_loop.put(message)

    def _pong(self, ping: m.Ping) -> None:
        self._reporter.send(m.Pong(ping.request_id))
