"""Talking to a running supervisor, from any process of its user. Blocking; used by the command line."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stagelaunch.core.errors import ControlError, NotRunningError
from stagelaunch.supervisor.runtime import Runtime


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over the control socket of a runtime."""

    def __init__(self, runtime: Runtime, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._runtime = runtime
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Connect through a directory descriptor: a socket address is at most 107 bytes long."""
        directory = os.open(self._runtime.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Waited for by the kernel: a connect with Python's timeout fails at once where many wait already.
        whole_s, part_s = divmod(self._timeout_s, 1.0)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(whole_s), int(part_s * 1e6)))
        self.sock.setblocking(True)
        try:
            self.sock.connect(f"/proc/self/fd/{directory}/{self._runtime.socket.name}")
        except BlockingIOError:
            raise TimeoutError from None
        finally:
            os.close(directory)
        self.sock.settimeout(self._timeout_s)


def request(runtime: Runtime, method: str, path: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """The JSON answer of the deployment's supervisor. NotRunningError when there is none, ControlError when it does
    not give one."""
    status, body = exchange(runtime, method, path, timeout_s)
    name = runtime.directory.name
    if status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        raise ControlError(f"deployment {name} runs, but cannot answer: {body.get('error')}")
    if status in _REFUSED:
        raise ControlError(f"deployment {name} runs, but refuses: {body.get('error')}")
    return body


_REFUSED = (http.HTTPStatus.FORBIDDEN, http.HTTPStatus.METHOD_NOT_ALLOWED, http.HTTPStatus.NOT_IMPLEMENTED)


def exchange(runtime: Runtime, method: str, path: str, timeout_s: float = 10.0) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of an answer, whatever the status. Raises as ``request``."""
    with _connected(runtime, timeout_s) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        body: dict[str, Any] = json.loads(response.read())
        return response.status, body


def stream(runtime: Runtime, path: str, timeout_s: float = 10.0) -> Iterator[dict[str, Any]]:
    """The records of an answer of one JSON object a line, each when it comes. Raises as ``request``.

    ``timeout_s`` is for the beginning of the answer; between records there is no limit.
    """
    with _connected(runtime, timeout_s) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ControlError(f"deployment {runtime.directory.name} refuses: {json.loads(response.read())['error']}")
        connection.sock.settimeout(None)
        while line := response.readline():
            yield json.loads(line)


@contextmanager
def _connected(runtime: Runtime, timeout_s: float) -> Iterator[_UnixConnection]:
    """A connection for one request; what goes wrong in the body is said as what it means."""
    name = runtime.directory.name
    connection = _UnixConnection(runtime, timeout_s)
    try:
        yield connection
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        if (waits_for := runtime.waits_for) is not None:
            raise NotRunningError(
                f"cannot reach deployment {name}: it waits for {waits_for} (supervisor pid {runtime.live_pid()}) and "
                f"no stage runs yet; wait, or end that with `stagelaunch down {runtime.argument}`"
            ) from error
        if (ended := runtime.read_state()).get("state") == "ended":
            code = ended.get("exit_code")
            raise NotRunningError(
                f"cannot reach deployment {name}: it is not running; its last run ended with exit code {code} "
                f"(`stagelaunch status {runtime.argument}` says more)"
            ) from error
        raise NotRunningError(
            f"cannot reach deployment {name}: nothing answers at {runtime.socket}; "
            "it is not running, or its config names another runtime_dir: then give the config file"
        ) from error
    except TimeoutError as error:
        raise ControlError(
            f"cannot reach deployment {name}: its supervisor (pid {runtime.live_pid()}) "
            f"did not answer in {timeout_s:g}s; try again, or look at {runtime.supervisor_log}"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ControlError(f"cannot talk to deployment {name}: {error!r}; it may be ending, try again") from error
    finally:
        connection.close()
