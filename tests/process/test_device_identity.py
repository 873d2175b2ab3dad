"""The commands under a CUDA driver that shows its devices in any order, cut, hidden, lost or hanging."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from deployments import Ran, Site, light_stage

from stagelaunch.config_file import load_deployment
from stagelaunch.core.errors import ConfigError
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.units import GIB
from stagelaunch.devices.simfile import SimulatedFile
from stagelaunch.supervisor.admission import Admitted, admit
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.system.locks import LockDirectory

GPUS = [f"GPU-8932f93{n}-d72c-4106-c12f-20bd9faed9f6" for n in range(3)]
MIGS = [f"MIG-7f0b3d0{n}-0000-5a3c-8f0d-1c2d3e4f5a6b" for n in range(2)]
Place = Callable[..., Site]


@pytest.fixture
def site(tmp_path: Path, fake_nvml: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A deployment on a fake driver with three GPUs; ``uuids`` and other settings of the driver by name."""
    machine = SimulatedMachine(tmp_path / "devices", {index: (index + 1) * GIB for index in range(3)}, 0)
    file = SimulatedFile.open(machine)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml))
    monkeypatch.setenv("FAKE_NVML_FILE", str(machine.path))
    monkeypatch.setenv("FAKE_NVML_NAME", "H100")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def make(*devices: int | str, uuids: list[str] = GPUS, **environment: str) -> Site:
        monkeypatch.setenv("FAKE_NVML_UUIDS", ",".join(uuids))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        stages = [light_stage(i, f"stage-{i}", 0, devices=[ref]) for i, ref in enumerate(devices)]
        timeouts = {"phase": "30s", "stage": "50s", "boot": "70s", "lock": "40s", "stop": "3s", "driver": "3s"}
        site = Site(tmp_path, stages, {"backend": "cuda", "simulated": None, "timeouts": timeouts})
        site.write()
        return site

    yield make
    file.close()


def planned(site: Site) -> tuple[list[list[int]], dict[int, str]]:
    """Groups and devices in use of ``plan --json``, which fits."""
    ran = site.run("plan", str(site.config), "--json")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    return body["groups"], {device["id"]: device["uuid"] for device in body["devices"] if device["demands"]}


def admitted(site: Site) -> Admitted:
    loaded, runtime = load_deployment(site.config), Runtime(site.directory / "run" / "site")
    with ExitStack() as held:
        return asyncio.run(admit(loaded, None, runtime, LockDirectory(loaded.lock_dir), held))


def checks(ran: Ran) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(ran.stdout)["checks"]}


def test_numbers_and_uuids_of_one_device_are_one_device(site: Place) -> None:
    assert planned(site(2, "GPU-8932f932", 0)) == ([[0, 1], [2]], {0: GPUS[0], 2: GPUS[2]})


def test_numbers_count_what_is_visible(site: Place) -> None:
    place = site(0, "GPU-8932f932", 1, CUDA_VISIBLE_DEVICES="2,1")
    assert planned(place) == ([[0, 1], [2]], {0: GPUS[2], 1: GPUS[1]})


def test_a_hidden_device_is_not_there(site: Place) -> None:
    place = site(0, "GPU-8932f930", CUDA_VISIBLE_DEVICES="2")
    for command in ("plan", "up"):
        ran = place.run(command, str(place.config))
        assert ran.code == 69
        assert "device GPU-8932f930: asked for by stage 1, but it is not among those of CUDA_VISIBLE" in ran.stderr
    ran = place.run("doctor", "--config", str(place.config), "--json")
    assert ran.code == 69
    assert [(device["index"], device["uuid"]) for device in json.loads(ran.stdout)["devices"]] == [(0, GPUS[2])]
    text = "device GPU-8932f930 of the config is not there; 2 more hidden by CUDA_VISIBLE_DEVICES; device GPU-8932f930:"
    assert checks(ran)["devices"]["text"].startswith(text)


def test_on_a_mixed_machine_visible_numbers_need_the_bus_order(site: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place = site(0, CUDA_VISIBLE_DEVICES="2,1")
    monkeypatch.delenv("FAKE_NVML_NAME")
    ran = place.run("plan", str(place.config))
    assert (ran.code, ran.stdout) == (69, "")
    assert "CUDA gives by speed where GPUs differ (Fake H100 0, Fake H100 1, Fake H100 2)" in ran.stderr
    doctor = place.run("doctor", "--config", str(place.config), "--json")
    assert (doctor.code, len(json.loads(doctor.stdout)["devices"])) == (69, 3)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert planned(place) == ([[0]], {0: GPUS[2]})


def test_the_drivers_order_is_what_numbers_mean(site: Place) -> None:
    assert planned(site(0, FAKE_NVML_ORDER="2,0,1")) == ([[0]], {0: GPUS[2]})


def test_workers_see_their_device_alone_by_uuid(site: Place) -> None:
    place = site(1, "GPU-8932f931", CUDA_VISIBLE_DEVICES="2,0,1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    before = dict(os.environ)
    boot = admitted(place)
    assert [(run.device_index, run.device_uuid) for run in boot.runs] == [(1, GPUS[0]), (2, GPUS[1])]
    seen = [(run.env["CUDA_VISIBLE_DEVICES"], run.env["CUDA_DEVICE_ORDER"]) for run in boot.runs]
    assert seen == [(GPUS[0], "PCI_BUS_ID"), (GPUS[1], "PCI_BUS_ID")]
    assert {index: info.uuid for index, info in boot.devices.items()} == {1: GPUS[0], 2: GPUS[1]}
    assert boot.deployment.stage_devices == {0: (1,), 1: (2,)}
    assert dict(os.environ) == before


def test_mig_devices(site: Place) -> None:
    place = site(0, "MIG-7f0b3d01", uuids=[GPUS[1], *MIGS], FAKE_NVML_MIG="0:1,2")
    ran = place.run("plan", str(place.config))
    assert ran.code == 69
    text = f"device 0: asked for by stage 0, but it is in MIG mode; name one of its MIG devices ({', '.join(MIGS)})"
    assert text in ran.stderr
    place = site(MIGS[0], "MIG-7f0b3d01", uuids=[GPUS[1], *MIGS])
    assert planned(place) == ([[0], [1]], {1: MIGS[0], 2: MIGS[1]})
    assert [run.env["CUDA_VISIBLE_DEVICES"] for run in admitted(place).runs] == MIGS
    ran = place.run("doctor", "--config", str(place.config))
    assert f"ok  device {GPUS[1]}: not usable: it is in MIG mode" in ran.stdout


@pytest.mark.parametrize("fault", ["hang_device_1", "lost_device_1"])
def test_a_bad_device_is_refused_by_name_and_takes_no_other_along(site: Place, fault: str) -> None:
    reason = "the driver did not answer in 3.00s" if fault.startswith("hang") else "it cannot be read: GPU is lost"
    place = site(0, 1, FAKE_NVML_FAULT=fault)
    ran = place.up()
    assert ran.code == 69, ran.stderr
    assert "started" not in ran.stderr
    assert f"device 1: asked for by stage 1, but {reason}; check dmesg and nvidia-smi\n" in ran.stderr
    ran = place.run("doctor", "--config", str(place.config))
    assert ran.code == 69
    assert "device 1 of the config is not there; device 1: asked for by stage 1, but" in ran.stdout
    assert f"!!  device 1: not usable: {reason}" in ran.stdout
    assert admitted(site(0, GPUS[2])).deployment.device_indices == (0, 2)


def test_a_driver_that_hangs_as_a_whole_ends_the_boot(site: Place) -> None:
    ran = site(0, FAKE_NVML_FAULT="hang").up()
    assert ran.code == 69
    assert "cannot list CUDA devices: the driver did not answer in 3.00s" in ran.stderr


def test_one_device_in_two_forms_is_the_configs_fault(site: Place) -> None:
    place = site(0)
    place.stages[0]["devices"] = [1, 0, GPUS[1]]
    place.write()
    ran = place.run("plan", str(place.config))
    assert (ran.code, ran.stdout) == (78, "")
    assert f"{place.config}: stages[0].devices[2]: {GPUS[1]} and 1 are the same device, {GPUS[1]}" in ran.stderr
    with pytest.raises(ConfigError):
        admitted(place)
