"""What a process without a figure of its own makes of a device on which others come and go while it looks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, cycle, repeat
from pathlib import Path

import pytest

from stagelaunch.core.errors import DisturbedError
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.ledger import Source, Term
from stagelaunch.core.units import MIB
from stagelaunch.devices.simulated import SimulatedDevice
from stagelaunch.worker.own_memory import OwnMemory

Table = Mapping[int, int | None]
ALONE: Table = {1: None}
WITH_A_STRANGER: Table = {1: None, 2: None}
WITH_US: Table = {**WITH_A_STRANGER, os.getpid(): None}


class ScriptedDevice(SimulatedDevice):
    """Lists processes without their sizes: one scripted table each time it is asked, and us once we have a context."""

    def __init__(self, path: Path, tables: Iterator[Table], then: Iterable[Table]) -> None:
        super().__init__(SimulatedMachine(path, {0: 1 << 30}, 40 * MIB), 0)
        self._scripted, self._then = tables, then

    def create_context(self) -> None:
        super().create_context()
        self._scripted = chain(self._then, self._scripted)

    def process_table(self) -> Table:
        return next(self._scripted)


def create_context(path: Path, tables: Iterator[Table], then: Iterable[Table]) -> Term:
    device = ScriptedDevice(path / "devices", tables, then)
    try:
        return OwnMemory(device, [os.getpid()]).create_context()
    finally:
        device.close()


def test_who_comes_while_one_looks_makes_one_look_again(tmp_path):
    tables = chain([ALONE], repeat(WITH_A_STRANGER))
    assert create_context(tmp_path, tables, repeat(WITH_US)) == Term(40 * MIB, Source.FREE_DELTA, None)


def test_a_figure_that_is_told_no_more_is_not_replaced_by_a_change_of_the_device(tmp_path):
    device = SimulatedDevice(SimulatedMachine(tmp_path / "devices", {0: 1 << 30}, 40 * MIB), 0)
    memory = OwnMemory(device, [os.getpid()])
    assert memory.create_context().source == Source.OWN_PID
    device.process_table = lambda: None
    # What the first batch took was not inside any window.
    with pytest.raises(DisturbedError, match="the driver told what this process holds"):
        memory.non_torch()
    device.close()


def test_a_device_on_which_somebody_always_comes_or_goes_is_refused(tmp_path):
    with pytest.raises(DisturbedError, match="processes on the device changed each time it was looked at"):
        create_context(tmp_path, cycle([ALONE, WITH_A_STRANGER]), [])
