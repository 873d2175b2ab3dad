"""Asking for the devices of this machine without being taken along when a driver hangs.

For the supervisor and the commands: imports neither torch nor NVML. A CUDA driver is asked by a process of its own
(``inventory``), under a deadline; the file of simulated devices is read directly.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import suppress

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import DeviceInfo, SimulatedMachine, device_from_json
from stagelaunch.core.units import format_duration
from stagelaunch.devices.simfile import list_simulated_devices

# By name only: importing it here would pull NVML into the supervisor.
_COMMAND = (sys.executable, "-m", "stagelaunch.devices.inventory")
_REAP_S = 1.0
"""How long a killed asker is waited for. One that hangs in the kernel does not die; it is left to init."""


async def query_devices(backend: str, machine: SimulatedMachine | None, timeout_s: float) -> tuple[DeviceInfo, ...]:
    """Every device of the backend, by index. NoDeviceError when there is no driver or it does not answer in time.

    Returns, or raises, within ``timeout_s`` and a moment. Cancelling it kills the asking process.
    """
    if backend == "simulated" and machine is not None:
        return await asyncio.to_thread(list_simulated_devices, machine, timeout_s)
    request = _request(backend)
    process = await asyncio.create_subprocess_exec(
        *_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate(request)
    except TimeoutError:
        raise _no_answer(timeout_s) from None
    finally:
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _REAP_S)
    return _parse(output, errors)


def query_devices_sync(backend: str, machine: SimulatedMachine | None, timeout_s: float) -> tuple[DeviceInfo, ...]:
    """``query_devices`` for callers without an event loop."""
    if backend == "simulated" and machine is not None:
        return list_simulated_devices(machine, timeout_s)
    request = _request(backend)
    process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate(request, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise _no_answer(timeout_s) from None
    finally:
        if process.returncode is None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return _parse(output, errors)


def _request(backend: str) -> bytes:
    if backend != "cuda":
        raise ValueError(f"cannot list devices: backend {backend!r} is not cuda, nor simulated with its machine")
    return json.dumps({"backend": backend}).encode()


def _no_answer(timeout_s: float) -> NoDeviceError:
    return NoDeviceError(
        (
            f"cannot list CUDA devices: the driver did not answer in {format_duration(timeout_s)};"
            " check dmesg and nvidia-smi, a hung driver needs a reset",
        )
    )


def _parse(output: bytes, errors: bytes) -> tuple[DeviceInfo, ...]:
    try:
        answer = json.loads(output)
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
    return tuple(device_from_json(device) for device in answer["devices"])
