"""How the graphs of a stage are kept: all in one pool."""

from __future__ import annotations

from typing import Any

import pytest

from stagelaunch.core.errors import StageError
from stagelaunch.engines.graphs import GraphSet


class PoolDevice:
    def __init__(self) -> None:
        self.pools = 0
        self.captured: list[Any] = []

    def new_graph_pool(self) -> object:
        self.pools += 1
        return self.pools

    def capture(self, step: Any, inputs: Any, pool: object) -> Any:
        self.captured.append((inputs, pool))
        return inputs


def test_every_size_goes_into_one_pool_until_all_are_released() -> None:
    device = PoolDevice()
    graphs = GraphSet(device)  # type: ignore[arg-type]
    for size in (8, 4, 2):
        graphs.capture(size, lambda: (), (size,))  # type: ignore[arg-type, misc]
    assert device.captured == [((8,), 1), ((4,), 1), ((2,), 1)]
    assert graphs.smallest_for(3) == (4, (4,))
    with pytest.raises(StageError, match="captured already"):
        graphs.capture(4, lambda: (), (4,))  # type: ignore[arg-type, misc]
    graphs.release()
    graphs.capture(1, lambda: (), (1,))  # type: ignore[arg-type, misc]
    assert device.captured[-1] == ((1,), 2)
