"""Processes of nobody's deployment that hold memory of a simulated device, born and killed on command.

Forks them, so that one costs milliseconds; never imports torch. One JSON list a line, answered when it is done:
``arrive FILE TOTALS CONTEXT DEVICE BYTES``, ``change BYTES``, ``leave``, ``kill``. One stranger at a time. Ends at end
of file on its input, its stranger as well. Started by ``interleaving``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices.simfile import SimulatedFile


def live(channel: socket.socket, machine: SimulatedMachine, index: int) -> NoReturn:
    """The stranger: takes what it is told, gives back what it is told, answers each time."""
    file = SimulatedFile.open(machine)
    with channel.makefile("r") as orders:
        for line in orders:
            change_bytes = int(line)
            if change_bytes > 0:
                assert file.allocate(index, change_bytes)
            else:
                file.free(index, -change_bytes)
            channel.sendall(b"done\n")
    os._exit(0)


class Stranger:
    def __init__(self, machine: SimulatedMachine, index: int) -> None:
        self._channel, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._channel.close()
            try:
                live(theirs, machine, index)
            finally:
                os._exit(1)
        theirs.close()

    def change(self, size_bytes: int) -> None:
        self._channel.sendall(f"{size_bytes}\n".encode())
        assert self._channel.recv(5) == b"done\n", "the stranger died"

    def end(self, *, killed: bool) -> None:
        """Gone when this returns: its memory is the driver's again."""
        if killed:
            os.kill(self.pid, signal.SIGKILL)
        self._channel.close()
        os.waitpid(self.pid, 0)


def obey(order: list[Any], stranger: Stranger | None) -> Stranger | None:
    match order:
        case ["arrive", path, totals, context_bytes, index, size_bytes]:
            machine = SimulatedMachine(Path(path), {int(key): total for key, total in totals.items()}, context_bytes)
            stranger = Stranger(machine, index)
            stranger.change(size_bytes)
            return stranger
        case ["change", size_bytes]:
            assert stranger is not None
            stranger.change(size_bytes)
            return stranger
        case ["leave" | "kill" as how]:
            assert stranger is not None
            stranger.end(killed=how == "kill")
            return None
    raise AssertionError(f"unknown order: {order}")


def main() -> None:
    stranger: Stranger | None = None
    print("[]", flush=True)
    for line in sys.stdin:
        stranger = obey(json.loads(line), stranger)
        print(json.dumps([stranger.pid if stranger else None]), flush=True)


if __name__ == "__main__":
    main()
