import gc
import time

import pytest

from stagelaunch.core.groups import init_groups


@pytest.mark.parametrize(
    ("stage_devices", "groups"),
    [
        ({}, []),
        ({7: {3}}, [[7]]),
        ({0: {0}, 1: {1}, 2: {1}}, [[0], [1, 2]]),
        ({0: {0, 1}, 1: {1, 2}, 2: {2}}, [[0, 1, 2]]),
        ({2: {2}, 0: {0, 1}, 1: {1, 2}}, [[0, 1, 2]]),
        ({5: [0], 3: (9,), 1: [0, 0]}, [[1, 5], [3]]),
        ({0: [], 1: set(), 2: {0}}, [[0], [1], [2]]),
        ({0: {0}, 1: {1}, 2: {0, 1}}, [[0, 1, 2]]),
        ({9: {4}, 8: {5}, -1: {4}}, [[-1, 9], [8]]),
    ],
)
def test_groups_are_the_components_by_shared_device(stage_devices, groups):
    assert init_groups(stage_devices) == groups


def _deep(count: int) -> dict[int, tuple[int, ...]]:
    """Half the stages alone, the others joining them pairwise from the back: trees as deep as they get."""
    half = count // 2
    alone = {stage: (stage,) for stage in range(half)}
    joining = {half + step: (half - 1 - step, max(0, half - 2 - step)) for step in range(half)}
    return alone | joining


def _best_of(runs: int, stage_devices: dict[int, tuple[int, ...]]) -> float:
    best_s = float("inf")
    for _ in range(runs):
        began_s = time.process_time()
        assert len(init_groups(stage_devices)) == 1
        best_s = min(best_s, time.process_time() - began_s)
    return best_s


@pytest.mark.timeout(60)
def test_eight_times_the_stages_take_less_than_ten_times_the_time():
    small, large = _deep(12_500), _deep(100_000)
    gc.disable()  # a full collection in the large run only would be measured as ours
    try:
        ratios = (_best_of(3, large) / _best_of(5, small) for _ in range(5))
        assert any(ratio < 10 for ratio in ratios), "not even once in five tries"
    finally:
        gc.enable()
