"""The ways in which a stage can go wrong, done to the process that calls. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading


class InjectedError(Exception):
    """What ``KIND`` raise raises."""


def hang() -> None:
    threading.Event().wait()


def misbehave(kind: str) -> None:
    match kind:
        case "raise":
            raise InjectedError("injected")
        case "verbose":
            raise InjectedError("x" * 3_000_000)
        case "sysexit":
            sys.exit(3)
        case "osexit":
            os._exit(5)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "hang":
            hang()
        case "deaf":
            # Waits for its own mutex in a library that keeps the interpreter for itself: no thread of it runs.
            mutex = ctypes.create_string_buffer(128)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
            hang()
        case "fork":
            leave_a_child_behind()
        case "session":
            leave_an_orphan_behind()
            os._exit(5)
        case "double":
            leave_an_orphan_behind()
        case "oom":
            import torch

            raise torch.OutOfMemoryError("injected: the device is out of memory")
        case "ignoreterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            hang()
        case _:
            raise AssertionError(f"unknown kind of fault: {kind}")


def leave_a_child_behind() -> None:
    """Die with a child in the same process group that ignores SIGTERM; its pid is said in the stage's log."""
    said, say = os.pipe()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(2, f"left behind (pid {os.getpid()})\n".encode())
        os.write(say, b".")
        hang()
    os.read(said, 1)
    os._exit(5)


def leave_an_orphan_behind() -> None:
    """A grandchild that is nobody's child, in a session of its own, and ignores SIGTERM; its pid is in the log."""
    said, say = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(2, f"left behind (pid {os.getpid()})\n".encode())
            os.write(say, b".")
            hang()
        os._exit(0)
    os.waitpid(child, 0)
    os.read(said, 1)
