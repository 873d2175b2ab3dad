"""The process that stages are forked from: it imports what they need, once, and runs none of it.

Run by path by ``supervisor.forkserver``, with the descriptor of a socket to it. One thread, and it must stay the only
one: a fork copies no other. A stage that has ended stays a zombie until the supervisor is done with it: so long its
number means its group and its session.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from traceback import format_exception_only
from typing import Any, NoReturn

MAX_BYTES = 1 << 18
"""Of one message: more than a socket holds."""
LIBRARY_THREADS = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""While libraries are imported: no pool of threads, and no CUDA context for a question that NVML can answer."""
_PR_SET_NAME = 15
_OPENED_MAX = 100


def main(fd: int) -> None:
    """Import, then fork a stage for every request, until the supervisor closes its end."""
    channel = socket.socket(fileno=fd)
    parent = _hear(channel)
    sys.path[:] = parent["sys_path"]
    from stagelaunch.system.process import die_with_parent

    die_with_parent(parent["parent_pid"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The supervisor may have started this one while it kept signals from itself.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    added = {name: value for name, value in LIBRARY_THREADS.items() if name not in os.environ}
    os.environ.update(added)
    import_module("stagelaunch.worker.main")
    job = _hear(channel)
    _say_to(job["log"])
    # From here on it may be asked where it is.
    _tell(channel, kind="importing")
    # What the stages say for themselves counts.
    os.environ.update(job["environment"])
    before = _of_process()
    _import_all(job["engines"], job["backend"])
    for name in added.keys() - job["environment"].keys():
        os.environ.pop(name, None)
    _close_driver()
    now = _of_process()
    reason = _unfit([what for what in now if now[what] != before[what]] if len(job["engines"]) > 1 else [])
    _tell(channel, kind="imported", unfit=reason)
    if reason is not None:
        return
    # What a library has set is for the stages: here it would take away how they end.
    on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        Forkserver(channel).serve()
        return
    except _InStage as caught:
        stage = caught
    # Out here, so that what a stage raises, and the stacks it shows, do not begin with ours.
    if on_child is not None:
        signal.signal(signal.SIGCHLD, on_child)
    stage.run()


def _hear(channel: socket.socket) -> dict[str, Any]:
    data = channel.recv(MAX_BYTES)
    if not data:
        os._exit(0)
    message: dict[str, Any] = json.loads(data)
    return message


def _say_to(log: str) -> None:
    """What libraries print while they are imported, and stacks; a log that cannot be opened costs the words."""
    import_module("stagelaunch.worker.output").Output(Path(log), lambda _: None).redirect()


def _import_all(engines: list[str], backend: str) -> None:
    """What cannot be imported is only noted: the stage that needs it finds out again, and fails with it."""
    own_pid = os.getpid()
    for engine in engines:
        try:
            import_module("stagelaunch.engines.base").import_engine(engine)
        except (Exception, SystemExit) as error:
            # An error of a library may be unable to say what it is.
            said = "".join(format_exception_only(error))
            with suppress(OSError):
                os.write(2, f"cannot import {engine}: {said}".encode(errors="replace"))
    if os.getpid() != own_pid:
        # A child that a library has forked and let come back: a second one at the same socket would take requests away.
        os._exit(0)
    # A stage without torch need not wait for it.
    if "torch" in sys.modules:
        import_module("stagelaunch.worker.boot")
        import_module(f"stagelaunch.devices.{backend}")
    # Where a library has closed one, a stage's channel would take its number, and be written over by its log.
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Or each stage would write it again.
    import_module("stagelaunch.worker.output").flush_output()
    # What is there now stays for good. Collected in a stage, its pages would be copied for nothing.
    gc.collect()
    gc.freeze()


def _close_driver() -> None:
    """An import may have asked NVML; what that keeps open does not survive a fork. A stage opens it again."""
    with open("/proc/self/maps") as maps:
        if not any("libnvidia-ml.so" in line for line in maps):
            return
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    # Once for every time it was opened; then it says that it is closed.
    for _ in range(_OPENED_MAX):
        if nvml.nvmlShutdown() != 0:
            break


def _of_process() -> Mapping[str, object]:
    """What every stage inherits and no engine can expect to have to itself."""
    mask = os.umask(0)
    os.umask(mask)
    return {"the working directory": os.readlink("/proc/self/cwd"), "the umask": mask}


def _unfit(changed: list[str]) -> str | None:
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    reason: str | None = import_module("stagelaunch.core.preload").unfit(
        len(os.listdir("/proc/self/task")), files, sys.modules, changed
    )
    return reason


def _tell(channel: socket.socket, **message: Any) -> None:
    channel.send(json.dumps(message).encode())


class _InStage(BaseException):
    """Raised in the process that was just forked: it is a stage from here on."""

    def __init__(self, request: Mapping[str, Any], fd: int, parent: int, inherited: tuple[int, ...]) -> None:
        self._request = request
        self._fd = fd
        self._parent = parent
        self._inherited = inherited

    def run(self) -> NoReturn:
        """Never returns."""
        try:
            from stagelaunch.system.process import die_with_parent

            die_with_parent(self._parent)
            os.setsid()
            for fd in self._inherited:
                os.close(fd)
            ctypes.CDLL(None).prctl(_PR_SET_NAME, self._request["name"].encode(), 0, 0, 0)
            channel = socket.socket(fileno=self._fd)
            # A library may have set a default.
            channel.settimeout(None)
            import_module("stagelaunch.worker.main").run(self._request["run_file"], self._request["stage_id"], channel)
        finally:
            os._exit(1)


class Forkserver:
    """Forks stages and says how they end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._pids: dict[int, int] = {}
        """The pid behind each pidfd that is watched."""

    def serve(self) -> None:
        """Returns when the supervisor has closed its end."""
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            # Ends first: a supervisor that has not heard of one for long has the stage reaped unheard.
            for fd in ready & self._pids.keys():
                self._tell_end(fd)
            if self._channel.fileno() in ready and not self._take_request():
                return

    def _tell_end(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid = self._pids.pop(pidfd)
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert info is not None
        code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        _tell(self._channel, kind="ended", pid=pid, code=code)

    def _take_request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._channel, MAX_BYTES, 1)
        if not data:
            return False
        request = json.loads(data)
        if "reap" in request:
            os.waitpid(request["reap"], 0)
        else:
            self._start(request, fds)
        return True

    def _start(self, request: Mapping[str, Any], fds: list[int]) -> None:
        number = request["start"]
        if not fds:
            _tell(self._channel, kind="not started", number=number, reason="out of descriptors")
            return
        (fd,) = fds
        try:
            pid = self._fork(request, fd)
        except OSError as error:
            _tell(self._channel, kind="not started", number=number, reason=str(error))
        else:
            _tell(self._channel, kind="started", number=number, pid=pid)
        os.close(fd)

    def _fork(self, request: Mapping[str, Any], fd: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            raise _InStage(request, fd, parent, (self._channel.fileno(), *self._pids))
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            # A process that cannot be watched must not live.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._pids[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        return pid


if __name__ == "__main__":
    code = 1
    try:
        main(int(sys.argv[1]))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Not through the interpreter's exit: it would wait for whatever a library has left behind.
        os._exit(code)
