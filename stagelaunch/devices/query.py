"""Asking for the devices of this machine without being taken along when a driver hangs.

For the supervisor and the commands: imports neither torch nor NVML. A CUDA driver is asked by a process of its own
(``inventory``), under a deadline; the file of simulated devices is read directly.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from stagelaunch.core.config import Timeouts
from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import Inventory, SimulatedMachine, inventory_from_json
from stagelaunch.core.units import format_duration
from stagelaunch.devices.simfile import simulated_inventory

INVENTORY_TIMEOUT_S: float = Timeouts.model_fields["driver_s"].default
"""How long the driver may take to tell about its devices where no config says."""

# By name only: importing it here would pull NVML into the supervisor.
_COMMAND = (sys.executable, "-m", "stagelaunch.devices.inventory")
_MOMENT_S = 1.0
"""What the asking process may take to say, at the deadline, which devices have not answered."""
_REAP_S = 1.0
"""How long a killed asker is waited for. One that hangs in the kernel does not die; it is left to init."""
_LINE_MAX_BYTES = 64 * 1024 * 1024


async def query_devices(
    backend: str, machine: SimulatedMachine | None, timeout_s: float, uuids: Sequence[str] = ()
) -> Inventory:
    """Every device of the backend; of CUDA with ``uuids`` only those, whatever becomes of the others.

    A device that does not answer in time is among the unusable. NoDeviceError when there is no driver, or nothing
    answers. Returns, or raises, within ``timeout_s`` and a moment. Cancelling it kills the asking process.
    """
    if backend == "simulated" and machine is not None:
        return await asyncio.to_thread(simulated_inventory, machine, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    request = _request(backend, timeout_s, deadline_s, uuids)
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LINE_MAX_BYTES,
    )
    try:
        async with asyncio.timeout(deadline_s + _MOMENT_S - time.monotonic()):
            line, errors = await _answer(process, request)
    except TimeoutError:
        raise _no_answer(timeout_s) from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _REAP_S)
    return _parse(line, errors)


def query_devices_sync(
    backend: str, machine: SimulatedMachine | None, timeout_s: float, uuids: Sequence[str] = ()
) -> Inventory:
    """``query_devices`` for callers without an event loop."""
    if backend == "simulated" and machine is not None:
        return simulated_inventory(machine, timeout_s)
    return asyncio.run(query_devices(backend, machine, timeout_s, uuids))


async def _answer(process: asyncio.subprocess.Process, request: bytes) -> tuple[bytes, bytes]:
    """The line it says, or nothing and its last words."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    last_words = asyncio.create_task(process.stderr.read())
    try:
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(request)
            process.stdin.close()
            await process.stdin.wait_closed()
        # A line, not all until its end: while one of its threads hangs in the kernel, its pipes stay open.
        line = await process.stdout.readline()
        return line, b"" if line else await last_words
    finally:
        last_words.cancel()


def _request(backend: str, timeout_s: float, deadline_s: float, uuids: Sequence[str]) -> bytes:
    if backend != "cuda":
        raise ValueError(f"cannot list devices: backend {backend!r} is not cuda, nor simulated with its machine")
    body = {"backend": backend, "timeout_s": timeout_s, "deadline_s": deadline_s, "uuids": list(uuids)}
    return json.dumps(body).encode()


def _no_answer(timeout_s: float) -> NoDeviceError:
    return NoDeviceError(
        (
            f"cannot list CUDA devices: the driver did not answer in {format_duration(timeout_s)};"
            " check dmesg and nvidia-smi, a hung driver needs a reset",
        )
    )


def _parse(line: bytes, errors: bytes) -> Inventory:
    try:
        answer = json.loads(line)
    except ValueError:
        last_line = (errors.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise NoDeviceError(
            (
                f"cannot list CUDA devices: the asking process failed: {last_line};"
                ' run `python -m stagelaunch.devices.inventory <<< \'{"backend": "cuda"}\'` to see why',
            )
        ) from None
    if "findings" in answer:
        raise NoDeviceError(tuple(answer["findings"]))
    return inventory_from_json(answer)
