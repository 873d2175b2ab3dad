"""The real warden around ``kin.py``: started, listened to, and cleaned up after. Needs no library."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagelaunch.system import cgroup, tree
from stagelaunch.system.tree import Process, read_process
from stagelaunch.warden import PASSED_ON

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TIMEOUT_S = 20.0
WITHOUT_CGROUP = "warden.cgroup.create = lambda run_id: None"


def can_have_cgroup() -> bool:
    made = cgroup.create("probe")
    return made is not None and cgroup.remove(made)


def command(kinds: str, then: str, changes: str = "") -> list[str]:
    """The command line of what divides itself as ``up`` does, with ``kin.py`` as the supervisor.

    With ``changes``: it goes on as it is, with these changes made to it, where it would become the warden by an exec.
    """
    become = "os._exit(warden.main(command[4:]))" if changes else "os.execv(command[0], command)"
    code = f"""
import os, sys
sys.path.append({str(ROOT)!r})
from stagelaunch import warden
from stagelaunch.system import tree
{changes}
run = warden.begin()
supervisor = warden.fork(run)
if supervisor == 0:
    own = ["--run-id", run.run_id, *([] if run.cgroup is None else ["--cgroup", str(run.cgroup)])]
    os.execv(sys.executable, [sys.executable, {str(HERE / "kin.py")!r}, *own, *sys.argv[1:]])
command = warden.command(run, supervisor, "kin")
{become}
"""
    return [sys.executable, "-I", "-S", "-c", code, kinds, then]


def as_up_does() -> None:
    """In the child before exec: from then on no signal is lost."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


@dataclass
class Ward:
    """A running warden and what its supervisor says."""

    process: subprocess.Popen[bytes]
    said: list[str] = field(default_factory=list)
    kin: dict[str, Process] = field(default_factory=dict)
    """By kind, the supervisor too."""
    pidfds: dict[str, int] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        kinds: str = "",
        then: str = "until SIGTERM",
        *,
        changes: str = "",
        prepare: Callable[[], None] = as_up_does,
        prefix: tuple[str, ...] = (),
        **popen: Any,
    ) -> Ward:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        words = [*prefix, *command(kinds, then, changes)]
        return cls(subprocess.Popen(words, preexec_fn=prepare, **streams))

    def until(self, text: str) -> Ward:
        """Listen until the supervisor has said that; processes it names are watched from then on."""
        while text not in self.said:
            line = self._line()
            assert line, f"never said {text!r}: {self.said}"
            self.said.append(line)
            self._watch(line)
        return self

    def _line(self) -> str:
        # Byte by byte: a buffered reader would hide from select what it has read ahead.
        assert self.process.stdout is not None
        fd, line = self.process.stdout.fileno(), b""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not line.endswith(b"\n"):
            assert select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0], self.said
            byte = os.read(fd, 1)
            if not byte:
                return ""
            line += byte
        return line.decode().strip()

    def _watch(self, line: str) -> None:
        kind, _, pid = line.partition(" ")
        if pid.isdecimal() and kind not in ("zombies", "run") and (process := read_process(int(pid))) is not None:
            fd = tree.open_process(process)
            if fd is not None:
                self.kin[kind], self.pidfds[kind] = process, fd

    @property
    def run_id(self) -> str:
        return next(line.split()[1] for line in self.said if line.startswith("run "))

    @property
    def cgroup(self) -> Path | None:
        text = next(line.split()[1] for line in self.said if line.startswith("cgroup "))
        return None if text == "None" else Path(text)

    def stderr(self) -> str:
        """What the warden says, to its end."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def end(self) -> int:
        """Its exit code, once it is over and all that was said is heard."""
        while line := self._line():
            self.said.append(line)
        return self.process.wait(TIMEOUT_S)

    def living(self) -> set[str]:
        """The kinds that live now."""
        return {kind for kind, fd in self.pidfds.items() if not select.select([fd], [], [], 0)[0]}

    def gone(self, *kinds: str) -> bool:
        """Whether all of these (all known, if none is named) die, soon if not before."""
        wanted = [self.pidfds[kind] for kind in kinds or self.pidfds]
        return tree.wait_for_ends(wanted, time.monotonic() + TIMEOUT_S)

    def close(self) -> None:
        """End whatever is left of it."""
        self.process.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()
        for fd in self.pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        if any(line.startswith("run ") for line in self.said):
            tree.sweep(lambda table: tree.find_run(self.run_id, table), TIMEOUT_S)
            if self.cgroup is not None:
                cgroup.kill(self.cgroup)
                cgroup.remove(self.cgroup, TIMEOUT_S)
        for fd in self.pidfds.values():
            os.close(fd)
