"""Each stage, in each phase, goes wrong in each way: a slice of the matrix that ``scripts/soak faults`` runs whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faults import CELLS, Cell, cover, run_cell

FULL = os.environ.get("STAGELAUNCH_SOAK") == "1"
SLICE = CELLS if FULL else cover(76850)[::2]


@pytest.mark.soak
@pytest.mark.parametrize("cell", SLICE, ids=str)
def test_nothing_is_left_and_the_culprit_is_named(tmp_path: Path, cell: Cell) -> None:
    verdict = run_cell(tmp_path, cell)
    assert verdict.problems == (), "\n".join(verdict.problems)
