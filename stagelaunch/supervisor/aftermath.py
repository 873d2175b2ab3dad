"""What is still there once a deployment is to end: processes that have not gone, and device memory that is not back.

Asks and says; what counts as missing is ``core.outcome``'s business. Used by ``supervisor.session``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Set

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import DeviceInfo
from stagelaunch.core.outcome import memory_leftovers
from stagelaunch.core.units import format_size
from stagelaunch.system.tree import describe_pid

SAY_EVERY_S = 2.0
MEMORY_POLL_S = 0.05

DevicesNow = Callable[[], Awaitable[dict[int, DeviceInfo]]]


async def say_who_is_left(
    live_pids: Callable[[], Mapping[str, int]], devices_now: DevicesNow, say: Callable[[str], None]
) -> None:
    """Every two seconds: which stages have not ended, the state of their processes, and what they hold.

    Returns when all are gone. A driver that does not answer costs only the last part.
    """
    while True:
        await asyncio.sleep(SAY_EVERY_S)
        if not live_pids():
            return
        try:
            held = held_by_pid(await devices_now())
        except NoDeviceError:
            held = {}
        for name, pid in live_pids().items():
            amounts = ", ".join(held.get(pid, ())) or "no device memory that the driver knows of"
            say(f"still there: {name}, {describe_pid(pid)}, holding {amounts}")


def held_by_pid(devices: Mapping[int, DeviceInfo]) -> dict[int, list[str]]:
    """What each process holds, as one text a device."""
    held: dict[int, list[str]] = {}
    for index, info in sorted(devices.items()):
        for process in info.processes:
            size = "an unknown amount" if process.size_bytes is None else format_size(process.size_bytes)
            held.setdefault(process.pid, []).append(f"{size} of device {index}")
    return held


async def memory_left(
    before: dict[int, DeviceInfo],
    own_pids: Set[int],
    tolerance_bytes: int,
    wait_s: float,
    devices_now: DevicesNow,
    say: Callable[[str], None],
) -> tuple[str, ...]:
    """What of the deployment's device memory is not back, one text a device; waits so long for it, and says for what.

    SIGKILL returning is not memory released: the driver frees it later.
    """
    deadline_s = time.monotonic() + wait_s
    say_at_s = time.monotonic() + SAY_EVERY_S
    while True:
        try:
            texts = memory_leftovers(before, await devices_now(), own_pids, tolerance_bytes)
        except NoDeviceError as error:
            texts = error.findings
        now_s = time.monotonic()
        if not texts or now_s >= deadline_s:
            return texts
        if now_s >= say_at_s:
            say_at_s += SAY_EVERY_S
            say(f"waiting for device memory: {'; '.join(texts)}")
        await asyncio.sleep(MEMORY_POLL_S)
