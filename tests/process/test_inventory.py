"""The real pynvml against a fake driver library that shows a simulated file, asked the way the supervisor asks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace

import pytest

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import Inventory, SimulatedMachine
from stagelaunch.devices import inventory, query
from stagelaunch.devices.query import query_devices, query_devices_sync
from stagelaunch.devices.simfile import SimulatedFile
from stagelaunch.supervisor.admission import devices_now

TIMEOUT_S = 20.0
HANG_S = 3.0
"""A deadline that is waited for in full; the asking process needs a part of it to start."""
PROCESS_TABLE = """
import os, sys
from pathlib import Path
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices.inventory import process_table
from stagelaunch.devices.simfile import SimulatedFile
file = SimulatedFile.open(SimulatedMachine(Path(sys.argv[1]), {0: 1000, 1: 2000}, 0))
file.allocate(1, 700)
table = process_table(sys.argv[2])
print(None if table is None else {"me" if pid == os.getpid() else pid: size for pid, size in table.items()})
"""
GPU = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIGS = ["MIG-7f0b3d0c-0000-5a3c-8f0d-1c2d3e4f5a6b", "MIG-9a1b2c3d-0000-5a3c-8f0d-1c2d3e4f5a6b"]


@pytest.fixture
def machine(tmp_path: Path) -> SimulatedMachine:
    return SimulatedMachine(tmp_path / "devices", {0: 1000, 1: 2000}, 0)


@pytest.fixture
def driver(fake_nvml, machine, monkeypatch):
    """The driver of ``machine``; a test may give it a fault through the environment."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml))
    monkeypatch.setenv("FAKE_NVML_FILE", str(machine.path))
    monkeypatch.setenv("FAKE_NVML_RESERVED", "40")
    file = SimulatedFile.open(machine)
    yield file
    file.close()


def children() -> list[str]:
    """Children of this process, zombies included."""
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def ask_async(timeout_s: float):
    return asyncio.run(query_devices("cuda", None, timeout_s))


def ask_sync(timeout_s: float):
    return query_devices_sync("cuda", None, timeout_s)


both = pytest.mark.parametrize("ask", [ask_async, ask_sync])


@both
def test_the_driver_and_the_file_tell_the_same(driver, machine, ask):
    driver.allocate(1, 300)
    driver.set_foreign_bytes(0, 100)
    cards = ask(TIMEOUT_S).devices
    assert [(card.index, card.uuid, card.name) for card in cards] == [
        (0, machine.uuid(0), "Fake H100 0"),
        (1, machine.uuid(1), "Fake H100 1"),
    ]
    figures = [(card.total_bytes, card.free_bytes, card.processes) for card in cards]
    assert figures == [(card.total_bytes, card.free_bytes, card.processes) for card in driver.snapshot()]
    assert figures[1][:2] == (2000, 1700)
    assert [(process.pid, process.size_bytes) for process in figures[1][2]] == [(os.getpid(), 300)]


def test_without_the_second_memory_call_what_the_driver_keeps_counts_as_used(driver, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_FAULT", "no_memory_v2")
    assert [(card.total_bytes, card.free_bytes) for card in ask_sync(TIMEOUT_S).devices] == [(1040, 1000), (2040, 2000)]


@pytest.mark.parametrize(
    ("fault", "sizes"),
    [
        ("no_processes_v3", [300]),
        ("table_grows_once", [300]),
        ("sizes_unknown", [None]),
        ("sizes_zero", [None]),
        ("processes_hidden", []),
        ("processes_raise", []),
        ("table_keeps_growing", []),
    ],
)
def test_processes_of_an_awkward_driver(driver, monkeypatch, fault, sizes):
    driver.allocate(0, 300)
    monkeypatch.setenv("FAKE_NVML_FAULT", fault)
    card = ask_sync(TIMEOUT_S).devices[0]
    assert (card.free_bytes, [process.size_bytes for process in card.processes]) == (700, sizes)


@both
def test_a_failing_driver_is_one_text_with_what_to_change(driver, monkeypatch, ask):
    monkeypatch.setenv("FAKE_NVML_FAULT", "driver_not_loaded")
    text = "cannot ask the NVIDIA driver for devices: Driver Not Loaded; make nvidia-smi work"
    with pytest.raises(NoDeviceError, match=text):
        ask(TIMEOUT_S)


def test_a_machine_without_a_driver(tmp_path, monkeypatch):
    # A library of that name that is none: found before any real one.
    (tmp_path / "libnvidia-ml.so.1").write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(NoDeviceError, match="NVML Shared Library Not Found; make nvidia-smi work"):
        ask_sync(TIMEOUT_S)


@both
def test_a_driver_that_hangs_is_given_up_and_killed(driver, monkeypatch, ask):
    monkeypatch.setenv("FAKE_NVML_FAULT", "hang")
    with pytest.raises(NoDeviceError, match=r"the driver did not answer in 0\.60s; check dmesg"):
        ask(0.6)
    assert children() == []


def test_cancelling_kills_the_asker(driver, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_FAULT", "hang")

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await query_devices("cuda", None, TIMEOUT_S)

    asyncio.run(scenario())
    assert children() == []


@both
def test_an_asker_that_dies_says_how_to_look(driver, monkeypatch, ask):
    monkeypatch.setenv("FAKE_NVML_FAULT", "crash")
    with pytest.raises(NoDeviceError, match=r"the asking process failed: .*; run `python -m stagelaunch"):
        ask(TIMEOUT_S)


def test_simulated_devices_are_read_from_the_file(machine):
    file = SimulatedFile.open(machine)
    file.allocate(1, 5)
    expected = file.snapshot()
    assert asyncio.run(query_devices("simulated", machine, TIMEOUT_S)) == Inventory(expected)
    assert query_devices_sync("simulated", machine, TIMEOUT_S) == Inventory(expected)
    file.close()


def test_an_unknown_backend_starts_nothing():
    with pytest.raises(ValueError, match="backend 'rocm' is not cuda"):
        query_devices_sync("rocm", None, TIMEOUT_S)
    with pytest.raises(ValueError, match="backend 'simulated' is not cuda"):
        asyncio.run(query_devices("simulated", None, TIMEOUT_S))


@pytest.mark.parametrize(
    ("fault", "table"),
    [
        ("", "{'me': 700}"),
        ("sizes_zero", "{'me': None}"),
        ("sizes_unknown", "{'me': None}"),
        ("processes_hidden", "None"),
        ("processes_raise", "None"),
        ("lost_device_1", "None"),
        ("driver_not_loaded", "None"),
    ],
)
def test_the_process_table_of_a_device(driver, spawn, machine, monkeypatch, fault, table):
    monkeypatch.setenv("FAKE_NVML_FAULT", fault)
    child = spawn(PROCESS_TABLE, machine.path, machine.uuid(1))
    assert child.stdout.readline().strip() == table


def test_a_mig_device_has_a_process_table(driver, spawn, machine, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_UUIDS", f"{GPU},{MIGS[0]}")
    monkeypatch.setenv("FAKE_NVML_MIG", "0:1")
    assert spawn(PROCESS_TABLE, machine.path, MIGS[0]).stdout.readline().strip() == "{'me': 700}"
    assert spawn(PROCESS_TABLE, machine.path, MIGS[1]).stdout.readline().strip() == "None"


def ticked(asking: Coroutine[object, object, Inventory]) -> tuple[Inventory, int]:
    """What is answered, and how often the loop could do something else meanwhile."""

    async def scenario() -> tuple[Inventory, int]:
        task = asyncio.ensure_future(asking)
        ticks = 0
        while not (await asyncio.wait([task], timeout=0.05))[0]:
            ticks += 1
        return task.result(), ticks

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "uuid", "name", "reason"),
    [
        ("lost_device_0", None, None, "it cannot be read: GPU is lost; check dmesg"),
        ("hang_device_0", None, None, "the driver did not answer in 3.00s; check dmesg"),
        ("hang_memory_0", GPU, "Fake H100 0", "the driver did not answer in 3.00s; check dmesg"),
    ],
)
def test_a_device_that_fails_or_hangs_takes_neither_the_others_nor_the_asker_along(
    driver, machine, monkeypatch, fault, uuid, name, reason
):
    driver.allocate(1, 300)
    monkeypatch.setenv("FAKE_NVML_UUIDS", f"{GPU},{machine.uuid(1)}")
    monkeypatch.setenv("FAKE_NVML_FAULT", fault)
    inventory, ticks = ticked(query_devices("cuda", None, HANG_S))
    assert [(card.index, card.uuid, card.free_bytes) for card in inventory.devices] == [(1, machine.uuid(1), 1700)]
    (lost,) = inventory.unusable
    assert (lost.index, lost.uuid, lost.name, lost.is_cut) == (0, uuid, name, False)
    assert lost.reason.startswith(reason)
    # What fails at once may be over before the loop has had its turn.
    assert ticks >= 3 or fault.startswith("lost")
    assert children() == []


def test_when_no_device_answers_each_is_named(driver, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_MIG", "0:1")
    monkeypatch.setenv("FAKE_NVML_UUIDS", f"{GPU},{MIGS[0]}")
    monkeypatch.setenv("FAKE_NVML_FAULT", "hang_memory_1")
    with pytest.raises(NoDeviceError, match=rf"cannot use device 0 \({GPU}\): the driver did not answer in 3\.00s"):
        ask_sync(HANG_S)


def test_an_answer_counts_before_the_asker_ends(monkeypatch):
    # As one whose thread hangs in the kernel: killed, and its pipes stay open.
    body = {"devices": [], "unusable": []}
    script = f"import threading; print({json.dumps(json.dumps(body))}, flush=True); threading.Event().wait()"
    monkeypatch.setattr(query, "_COMMAND", (sys.executable, "-c", script))
    assert ask_sync(TIMEOUT_S) == Inventory(())
    assert children() == []


def test_mig_devices_stand_for_the_gpu_they_are_part_of(fake_nvml, tmp_path, monkeypatch):
    machine = SimulatedMachine(tmp_path / "devices", {0: 1000, 1: 2000, 2: 300, 3: 400}, 0)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml))
    monkeypatch.setenv("FAKE_NVML_FILE", str(machine.path))
    monkeypatch.setenv("FAKE_NVML_UUIDS", ",".join([GPU, MIGS[0], machine.uuid(2), MIGS[1]]))
    monkeypatch.setenv("FAKE_NVML_MIG", "0:1,3")
    file = SimulatedFile.open(machine)
    try:
        file.allocate(3, 100)
        inventory = ask_sync(TIMEOUT_S)
    finally:
        file.close()
    assert [(card.index, card.uuid, card.free_bytes, len(card.processes)) for card in inventory.devices] == [
        (1, machine.uuid(2), 300, 0),
        (2, MIGS[0], 2000, 0),
        (3, MIGS[1], 300, 1),
    ]
    (whole,) = inventory.unusable
    assert (whole.index, whole.uuid, whole.is_cut) == (0, GPU, True)
    assert whole.reason == f"it is in MIG mode; name one of its MIG devices ({', '.join(MIGS)})"


def test_a_device_is_found_again_by_its_uuid(driver, machine, monkeypatch):
    before = {info.index: info for info in ask_sync(TIMEOUT_S).devices}
    driver.allocate(1, 300)
    # The numbers have shifted, and the device that is not asked for hangs.
    monkeypatch.setenv("FAKE_NVML_ORDER", "1,0")
    monkeypatch.setenv("FAKE_NVML_FAULT", "hang_device_0")
    began_s = time.monotonic()
    now = asyncio.run(devices_now({1: before[1]}, "cuda", None, TIMEOUT_S))
    assert time.monotonic() - began_s < TIMEOUT_S
    assert {index: (info.index, info.uuid, info.free_bytes) for index, info in now.items()} == {
        1: (1, machine.uuid(1), 1700)
    }
    monkeypatch.setenv("FAKE_NVML_FAULT", "lost_device_0")
    assert list(asyncio.run(devices_now(before, "cuda", None, TIMEOUT_S))) == [1]


def test_neither_torch_nor_nvml_reaches_the_supervisor(spawn):
    child = spawn(
        "import sys, stagelaunch.devices.query; print([m for m in ('torch', 'pynvml', 'numpy') if m in sys.modules])"
    )
    assert child.stdout.readline().strip() == "[]"


def test_the_inventory_needs_no_torch(spawn):
    child = spawn("import sys, stagelaunch.devices.inventory; print('torch' in sys.modules, 'pynvml' in sys.modules)")
    assert child.stdout.readline().strip() == "False False"


def test_what_a_process_takes_while_the_driver_is_asked_is_not_free(monkeypatch):
    # Between the two answers for free memory the process table is read, which already has the 300 bytes.
    answers = iter([(1000, 900), (1000, 600)])
    monkeypatch.setattr(inventory, "_memory", lambda nvml, handle: next(answers))
    monkeypatch.setattr(inventory, "_table", lambda nvml, handle: [(os.getpid(), 400)])
    driver = SimpleNamespace(nvmlDeviceGetUUID=lambda _: "GPU-0", nvmlDeviceGetName=lambda _: "H100")
    info = inventory._device(driver, None, 0)
    assert (info.free_bytes, info.processes[0].size_bytes) == (600, 400)
