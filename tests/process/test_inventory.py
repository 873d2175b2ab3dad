"""The real pynvml against a fake driver library that shows a simulated file, asked the way the supervisor asks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices import inventory
from stagelaunch.devices.query import query_devices, query_devices_sync
from stagelaunch.devices.simfile import SimulatedFile

TIMEOUT_S = 20.0
OWN_BYTES = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.devices.inventory import own_cuda_bytes
from stagelaunch.devices.simfile import SimulatedFile
machine = SimulatedMachine(Path(sys.argv[1]), {0: 1000, 1: 2000}, 0)
file = SimulatedFile.open(machine)
file.allocate(1, 700)
print(own_cuda_bytes(machine.uuid(0)), own_cuda_bytes(machine.uuid(1)))
"""


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
    cards = ask(TIMEOUT_S)
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
    assert [(card.total_bytes, card.free_bytes) for card in ask_sync(TIMEOUT_S)] == [(1040, 1000), (2040, 2000)]


@pytest.mark.parametrize(
    ("fault", "sizes"),
    [
        ("no_processes_v3", [300]),
        ("table_grows_once", [300]),
        ("sizes_unknown", [None]),
        ("processes_hidden", []),
    ],
)
def test_processes_of_an_awkward_driver(driver, monkeypatch, fault, sizes):
    driver.allocate(0, 300)
    monkeypatch.setenv("FAKE_NVML_FAULT", fault)
    assert [process.size_bytes for process in ask_sync(TIMEOUT_S)[0].processes] == sizes


@pytest.mark.parametrize(
    ("fault", "cause"), [("driver_not_loaded", "Driver Not Loaded"), ("table_keeps_growing", "Insufficient Size")]
)
@both
def test_a_failing_driver_is_one_text_with_what_to_change(driver, monkeypatch, ask, fault, cause):
    driver.allocate(0, 300)
    monkeypatch.setenv("FAKE_NVML_FAULT", fault)
    with pytest.raises(NoDeviceError, match=f"cannot ask the NVIDIA driver for devices: {cause}; make nvidia-smi work"):
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
    assert asyncio.run(query_devices("simulated", machine, TIMEOUT_S)) == expected
    assert query_devices_sync("simulated", machine, TIMEOUT_S) == expected
    file.close()


def test_an_unknown_backend_starts_nothing():
    with pytest.raises(ValueError, match="backend 'rocm' is not cuda"):
        query_devices_sync("rocm", None, TIMEOUT_S)
    with pytest.raises(ValueError, match="backend 'simulated' is not cuda"):
        asyncio.run(query_devices("simulated", None, TIMEOUT_S))


@pytest.mark.parametrize(
    ("fault", "answer"), [("", "None 700"), ("sizes_zero", "None None"), ("sizes_unknown", "None None")]
)
def test_the_own_figure_is_positive_or_unknown(driver, spawn, machine, monkeypatch, fault, answer):
    monkeypatch.setenv("FAKE_NVML_FAULT", fault)
    child = spawn(OWN_BYTES, machine.path)
    assert child.stdout.readline().strip() == answer


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
    monkeypatch.setattr(inventory, "_running", lambda nvml, handle: [(os.getpid(), 400)])
    driver = SimpleNamespace(
        nvmlDeviceGetHandleByIndex=str, nvmlDeviceGetUUID=lambda _: "GPU-0", nvmlDeviceGetName=lambda _: "H100"
    )
    info = inventory._device(driver, 0)
    assert (info.free_bytes, info.processes[0].size_bytes) == (600, 400)
