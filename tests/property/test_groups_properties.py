from hypothesis import given
from hypothesis import strategies as st

from stagelaunch.core.groups import init_groups

STAGE_DEVICES = st.dictionaries(st.integers(-5, 30), st.lists(st.integers(0, 12), max_size=4), max_size=14)


def _components(stage_devices: dict[int, list[int]]) -> list[list[int]]:
    """By the definition: merge any two groups with a device in common until there are none."""
    groups = [({stage}, set(devices)) for stage, devices in stage_devices.items()]
    merged = True
    while merged:
        merged = False
        for left in groups:
            right = next((other for other in groups if other is not left and other[1] & left[1]), None)
            if right is not None:
                groups.remove(right)
                left[0].update(right[0])
                left[1].update(right[1])
                merged = True
                break
    return sorted(sorted(stages) for stages, _ in groups)


@given(STAGE_DEVICES)
def test_groups_are_the_connected_components(stage_devices):
    assert init_groups(stage_devices) == _components(stage_devices)


@given(STAGE_DEVICES, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(stage_devices, random):
    items = [(stage, random.sample(devices, len(devices))) for stage, devices in stage_devices.items()]
    random.shuffle(items)
    assert init_groups(dict(items)) == init_groups(stage_devices)
