"""The service manager's side of a unit of Type=notify: datagrams to NOTIFY_SOCKET, as sd_notify(3) describes them.

Only the sending. ``supervisor.service`` decides what to say and when.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Mapping

from stagelaunch.core.run_options import ServiceLink

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""What a service manager sets for the process it starts, and for no child of it."""


def read_link(environment: Mapping[str, str], pid: int) -> ServiceLink:
    """The link of process ``pid``, from the variables it was started with; a watchdog meant for another is left out."""
    address = environment.get("NOTIFY_SOCKET") or None
    usec, meant_for = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", str(pid))
    wanted = usec.isdecimal() and int(usec) > 0 and meant_for == str(pid)
    return ServiceLink(address, int(usec) / 1e6 if address and wanted else None)


class NotifySocket:
    """Sends to ``address``, a path or an @abstract name; without one, nowhere.

    Never blocks and never raises, because no deployment may end over what is said about it: an address of another
    kind is refused with a line, and what goes wrong later is said once.
    """

    def __init__(self, address: str | None, say: Callable[[str], None]) -> None:
        self._say = say
        self._told = False
        self._socket: socket.socket | None = None
        if address is not None and (address[:1] not in ("/", "@") or len(address) < 2):
            say(
                f"cannot notify a service manager at {address!r}: only a path or an @abstract name is understood; "
                "going on without it"
            )
            address = None
        self.address = address
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, *lines: str) -> bool:
        """One datagram of ``NAME=value`` lines. False if it was not taken; the same may be sent again later."""
        if self._socket is None or self.address is None:
            return True
        target = os.fsencode(self.address)
        try:
            # By name each time: the manager may have made its socket anew. The kernel adds who we are.
            self._socket.sendto("\n".join(lines).encode(), b"\0" + target[1:] if target[:1] == b"@" else target)
        except (OSError, ValueError) as error:
            self._complain(error)
            return False
        return True

    def close(self) -> None:
        """Nothing is sent any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _complain(self, error: OSError | ValueError) -> None:
        if self._told:
            return
        self._told = True
        is_full = isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOBUFS)
        cause = "it does not read" if is_full else getattr(error, "strerror", None) or str(error)
        self._say(f"cannot notify the service manager at {self.address}: {cause}; going on without it")
