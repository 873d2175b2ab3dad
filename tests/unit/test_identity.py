"""Every way to name a device, every setting of CUDA_VISIBLE_DEVICES: one device, or why not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stagelaunch.config_file import load_deployment
from stagelaunch.core.config import Deployment, to_raw
from stagelaunch.core.errors import NoDeviceError
from stagelaunch.core.identity import number_refs, read_ref, resolve, same_devices, view
from stagelaunch.core.inventory import (
    DeviceInfo,
    Inventory,
    UnusableDevice,
    inventory_from_json,
    inventory_to_json,
    simulated_uuid,
)
from stagelaunch.core.plan import make_plan, make_plan_now
from stagelaunch.core.plan_json import plan_to_json
from stagelaunch.core.plan_text import render_plan
from stagelaunch.core.units import GIB

H100 = load_deployment(Path(__file__).parents[2] / "configs" / "qwen3-omni-2xh100.yaml").deployment
A = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
B = "GPU-8932aaaa-0000-4106-c12f-20bd9faed9f6"
C = "GPU-c0ffee00-0000-4106-c12f-20bd9faed9f6"
MIG = "MIG-7f0b3d0c-0000-5a3c-8f0d-1c2d3e4f5a6b"
LEGACY = f"MIG-{C}/1/0"


def device(index: int, uuid: str, name: str = "H100") -> DeviceInfo:
    return DeviceInfo(index, uuid, name, 80 * GIB, 80 * GIB)


ALIKE = Inventory((device(0, A), device(1, B), device(2, C)))
MIXED = Inventory((device(0, A), device(1, B, "A2"), device(2, C)))
CUT = Inventory(
    (device(0, A), device(2, MIG, "H100 MIG 1g"), device(3, LEGACY, "H100 MIG 1g")),
    (UnusableDevice(1, C, "H100", f"it is in MIG mode; name one of its MIG devices ({MIG})", is_cut=True),),
)
BROKEN = Inventory((device(0, A),), (UnusableDevice(1, None, None, "it cannot be read: GPU is lost"),))
SIMULATED = Inventory((device(0, simulated_uuid(0)), device(1, simulated_uuid(1))))


def meant(
    ref: int | str, inventory: Inventory = ALIKE, visible: str | None = None, order: str | None = "PCI_BUS_ID"
) -> str:
    """The UUID of the device that a stage means, or why there is none."""
    resolved = resolve({7: (ref,)}, view(inventory, visible, order))
    number = resolved.numbers[ref]
    found = {info.index: info.uuid for info in resolved.devices}
    assert (number in found) != (number in resolved.absent)
    return found.get(number) or resolved.absent[number].removeprefix(f"device {ref}: asked for by stage 7, but ")


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        (A, A),
        (A.upper(), A),
        ("GPU-8", "GPU-8"),
        ("GPU-8932F937-", "GPU-8932f937-"),
        (MIG, MIG),
        ("MIG-7f0b", "MIG-7f0b"),
        (LEGACY, LEGACY),
        ("SIM-00000000-0000", "SIM-00000000-0000"),
    ],
)
def test_the_forms_of_a_uuid(text: str, ref: str) -> None:
    assert read_ref(text) == ref


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "gpu-8932f937",
        "GPU-",
        "GPU--1",
        "GPU-8932f937d",
        "GPU-8932-f937",
        "GPU-893g",
        f"{A}0",
        f"{A} ",
        "GPU-8932f937\n",
        "8932f937",
        "TPU-8932f937",
        "MIG-GPU-c0ffee00/1/0",
        f"MIG-{C}/1",
        f"MIG-{C}/1/x",
        "cuda:0",
        "GPU-\N{ARABIC-INDIC DIGIT ONE}",
    ],
)
def test_other_texts_are_no_device(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a device: give a number, or a UUID like GPU-8932f937 or MIG-\.\.\."):
        read_ref(text)


@pytest.mark.parametrize(
    ("ref", "inventory", "answer"),
    [
        (0, ALIKE, A),
        (2, ALIKE, C),
        (3, ALIKE, "there is no such device; name one that is there (0, 1, 2)"),
        (A, ALIKE, A),
        ("GPU-8932f", ALIKE, A),
        ("GPU-c", ALIKE, C),
        ("GPU-8932", ALIKE, f"it may be {A}, {B}; write more of it"),
        ("GPU-dead", ALIKE, f"there is no such device; name one that is there ({A}, {B}, {C})"),
        (MIG, ALIKE, f"there is no such device; name one that is there ({A}, {B}, {C})"),
        (MIG, CUT, MIG),
        ("MIG-7", CUT, MIG),
        (LEGACY, CUT, LEGACY),
        (f"MIG-{C}/2/0", CUT, f"there is no such device; name one that is there ({A}, {C}, {MIG}, ...)"),
        (1, CUT, f"it is in MIG mode; name one of its MIG devices ({MIG})"),
        ("GPU-c0ffee", CUT, f"it is in MIG mode; name one of its MIG devices ({MIG})"),
        (2, CUT, f"numbers are for whole GPUs; name the MIG device by its UUID, {MIG}"),
        (0, BROKEN, A),
        (1, BROKEN, "it cannot be read: GPU is lost"),
        (
            "GPU-c0ffee",
            BROKEN,
            f"there is no such device (of device 1 nobody knows: it cannot be read: GPU is lost); name one that is "
            f"there ({A})",
        ),
        (1, SIMULATED, simulated_uuid(1)),
        (simulated_uuid(1), SIMULATED, simulated_uuid(1)),
        ("SIM-0", SIMULATED, f"it may be {simulated_uuid(0)}, {simulated_uuid(1)}; write more of it"),
        (0, Inventory(()), "there is no such device; name one that is there (none)"),
    ],
)
def test_what_a_reference_means(ref: int | str, inventory: Inventory, answer: str) -> None:
    assert meant(ref, inventory) == answer


@pytest.mark.parametrize(
    ("visible", "refs", "uuids"),
    [
        ("2,0", [0, 1], [C, A]),
        ("1", [0, B, "GPU-8932a"], [B, B, B]),
        ("GPU-c0, 1", [0, 1], [C, B]),
        (f"{B},{A}", [0, 1], [B, A]),
        ("0,-1,1", [0], [A]),
        ("2,", [0], [C]),
        ("1,9,0", [0], [B]),
    ],
)
def test_numbers_are_positions_in_what_is_visible(visible: str, refs: list[int | str], uuids: list[str]) -> None:
    assert [meant(ref, visible=visible) for ref in refs] == uuids


@pytest.mark.parametrize(
    ("visible", "ref", "inventory", "answer"),
    [
        ("1", 1, ALIKE, "there is no such position in CUDA_VISIBLE_DEVICES=1; name one of its devices by position (0)"),
        ("1", A, ALIKE, "it is not among those of CUDA_VISIBLE_DEVICES=1; add it there, or name one that is (0)"),
        ("0,-1,1", 1, ALIKE, "there is no such position in CUDA_VISIBLE_DEVICES=0,-1,1;"),
        ("0,-1,1", B, ALIKE, "it is not among those of CUDA_VISIBLE_DEVICES=0,-1,1;"),
        ("1,9,0", 1, ALIKE, "position in CUDA_VISIBLE_DEVICES=1,9,0 (which ends at 9: there is no such device);"),
        ("", 0, ALIKE, "no such position in CUDA_VISIBLE_DEVICES=; name one of its devices by position (none)"),
        ("-1", 0, ALIKE, "there is no such position in CUDA_VISIBLE_DEVICES=-1;"),
        ("NoDevFiles", A, ALIKE, "it is not among those of CUDA_VISIBLE_DEVICES=NoDevFiles;"),
        ("0,1", 1, BROKEN, "it cannot be read: GPU is lost"),
        ("0,1", 1, CUT, "it is in MIG mode"),
        ("2", 0, CUT, "there is no such position in CUDA_VISIBLE_DEVICES=2 (which ends at 2: there is no such device)"),
    ],
)
def test_what_is_not_visible_is_not_there(visible: str, ref: int | str, inventory: Inventory, answer: str) -> None:
    assert answer in meant(ref, inventory, visible)


def test_visible_mig_devices_are_numbered_by_position() -> None:
    assert [meant(ref, CUT, f"{LEGACY},MIG-7f") for ref in (0, 1)] == [LEGACY, MIG]
    seen = view(CUT, f"{MIG},0", "PCI_BUS_ID")
    assert [(info.index, info.uuid) for info in seen.devices] == [(0, MIG), (1, A)]


@pytest.mark.parametrize(
    ("visible", "text"),
    [
        ("0,0", "0 is a device that it names before"),
        ("0,GPU-8932f", "GPU-8932f is a device that it names before"),
        ("GPU-8932", f"GPU-8932 may be {A}, {B}; write more of it"),
        ("all", "'all' is not a device: give a number, or a UUID"),
        ("0;1", "'0;1' is not a device"),
        ("0x1", "'0x1' is not a device"),
        ("GPU-89:0", "'GPU-89:0' is not a device"),
    ],
)
def test_a_list_of_visible_devices_that_cannot_be_read(visible: str, text: str) -> None:
    with pytest.raises(NoDeviceError) as caught:
        view(ALIKE, visible, "PCI_BUS_ID")
    (finding,) = caught.value.findings
    assert finding.startswith(f"cannot tell which devices CUDA_VISIBLE_DEVICES={visible} means: {text}")


@pytest.mark.parametrize(
    ("inventory", "visible", "order", "is_certain"),
    [
        (ALIKE, "1,0", None, True),
        (ALIKE, "1,0", "FASTEST_FIRST", True),
        (MIXED, "1,0", "PCI_BUS_ID", True),
        (MIXED, "1,0", None, False),
        (MIXED, f"{A},0", "FASTEST_FIRST", False),
        (MIXED, "GPU-c0,GPU-8932f", None, True),
        (MIXED, "-1", None, True),
        (MIXED, None, None, True),
        # The name of a GPU that cannot be read may be another; that of a MIG device says nothing.
        (BROKEN, "0", None, False),
        (Inventory((), (UnusableDevice(0, A, None, ""), UnusableDevice(1, B, None, ""))), "0", None, False),
        (CUT, "0", None, True),
        (Inventory((device(0, A, "A2"),)), "0", None, True),
    ],
)
def test_numbers_of_gpus_that_differ_need_the_bus_order(
    inventory: Inventory, visible: str | None, order: str | None, is_certain: bool
) -> None:
    if is_certain:
        view(inventory, visible, order)
        return
    with pytest.raises(NoDeviceError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the devices by UUID"):
        view(inventory, visible, order)


def refs_of(*devices: Sequence[int | str]) -> dict[int, Sequence[int | str]]:
    return dict(enumerate(devices))


def test_all_names_of_a_device_are_one_device() -> None:
    resolved = resolve(refs_of([0], ["GPU-8932f"], [A], [1]), view(ALIKE, None, None))
    assert resolved.numbers == {0: 0, "GPU-8932f": 0, A: 0, 1: 1}
    assert (resolved.absent, resolved.twice) == ({}, ())


def test_a_stage_that_names_a_device_twice_is_told_where() -> None:
    refs = refs_of([0], [1, "GPU-8932f", 0], ["GPU-dead", 9])
    ((conflict),) = resolve(refs, view(ALIKE, None, None)).twice
    assert conflict.loc == ("stages", 1, "devices", 2)
    assert conflict.text == f"0 and GPU-8932f are the same device, {A}; name it once"


def test_what_is_not_there_gets_a_number_that_no_device_has() -> None:
    resolved = resolve(refs_of([0], [9, "GPU-dead"], ["GPU-8932", 2]), view(ALIKE, None, None))
    assert resolved.numbers == {0: 0, 9: 9, "GPU-dead": 10, "GPU-8932": 11, 2: 2}
    assert resolved.written == {9: "9", 10: "GPU-dead", 11: "GPU-8932"}
    assert sorted(resolved.absent) == [9, 10, 11]
    # Also where the number is taken: by a MIG device, which goes by its UUID.
    assert resolve(refs_of([2]), view(CUT)).numbers == {2: 4}


def test_devices_are_found_again_by_uuid_whatever_their_numbers() -> None:
    before = {5: device(5, A), 6: device(6, B)}
    assert same_devices(before, [device(0, C), device(1, A)]) == {5: device(5, A)}


def test_an_inventory_survives_the_way_between_processes() -> None:
    for inventory in (ALIKE, CUT, BROKEN):
        assert inventory_from_json(inventory_to_json(inventory)) == inventory


def moved(devices: Sequence[Sequence[int | str]]) -> Deployment:
    stages = [{**stage, "devices": list(refs)} for stage, refs in zip(to_raw(H100)["stages"], devices)]
    return Deployment.model_validate({**to_raw(H100), "stages": stages})


def test_groups_and_admission_see_one_device() -> None:
    deployment = moved([["GPU-c0"], [0], ["GPU-8932f"]])
    resolved = resolve(deployment.stage_refs, view(ALIKE))
    body = plan_to_json(make_plan_now(deployment, resolved, {}))
    assert (body["groups"], body["fits"]) == ([[0], [1, 2]], True)
    assert [(item["id"], item["uuid"], len(item["demands"])) for item in body["devices"]] == [
        (0, A, 2),
        (1, B, 0),
        (2, C, 1),
    ]


def test_a_plan_on_a_device_that_is_not_there_says_how_it_was_written() -> None:
    deployment = moved([[0], ["GPU-dead"], [1]])
    plan = make_plan_now(deployment, resolve(deployment.stage_refs, view(BROKEN)), {})
    assert [finding.partition(", but")[0] for finding in plan.missing] == [
        "device 1: asked for by stage 2",
        "device GPU-dead: asked for by stage 1",
    ]
    assert [row.split()[-1] for row in render_plan(plan).splitlines() if "not there" in row][:2] == ["1", "GPU-dead"]


def test_without_a_machine_each_uuid_is_a_device_of_its_own() -> None:
    numbers = number_refs([3, "GPU-8932", "GPU-8932f937", 3])
    assert numbers == {3: 3, "GPU-8932": 4, "GPU-8932f937": 5}
    deployment = moved([["GPU-8932"], [3], ["GPU-8932f937"]]).on_devices(numbers)
    plan = make_plan(deployment, {3: 80 * GIB, 4: 80 * GIB, 5: 80 * GIB}, uuids={4: "GPU-8932"})
    assert plan.groups == ((0,), (1,), (2,))


def test_a_deployment_has_no_numbers_before_it_is_resolved() -> None:
    with pytest.raises(ValueError, match="stage thinker: GPU-8932 is not resolved yet"):
        moved([["GPU-8932"], [0], [1]]).device_indices  # noqa: B018
