"""The other end of NOTIFY_SOCKET: a real datagram socket that is told by the kernel who sent what."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

_UCRED = struct.Struct("3i")
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Heard:
    """One datagram and its sender."""

    lines: tuple[str, ...]
    pid: int
    uid: int

    def value(self, name: str) -> str | None:
        return next((line.partition("=")[2] for line in self.lines if line.startswith(f"{name}=")), None)


class Manager:
    """Listens at a path or an @abstract name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.heard: list[Heard] = []

    def next(self, timeout_s: float = TIMEOUT_S) -> Heard:
        """TimeoutError when nothing comes."""
        self._socket.settimeout(timeout_s)
        data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(_UCRED.size))
        ((_, kind, credentials),) = ancillary
        assert kind == socket.SCM_CREDENTIALS
        pid, uid, _ = _UCRED.unpack(credentials)
        heard = Heard(tuple(data.decode().split("\n")), pid, uid)
        self.heard.append(heard)
        return heard

    def until(self, line: str) -> list[Heard]:
        """What is heard up to the first datagram with a line that begins so, that one included."""
        got = [self.next()]
        while not any(said.startswith(line) for said in got[-1].lines):
            got.append(self.next())
        return got

    def lines(self, name: str) -> list[str]:
        return [value for heard in self.heard if (value := heard.value(name)) is not None]

    def environment(self, watchdog_s: float) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": str(round(watchdog_s * 1e6))}

    def fill(self) -> None:
        """As one that no longer reads: nothing more goes into the queue."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            target = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
            try:
                while True:
                    sender.sendto(b"FILLER=1", target)
            except BlockingIOError:
                return

    def drain(self) -> None:
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        self._socket.close()
        if not self.address.startswith("@"):
            os.unlink(self.address)
