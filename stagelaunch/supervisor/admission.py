"""Before anything is spawned: the checkpoint is whole, the devices are there, the plan fits them now."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.admission import Holder, device_verdicts, free_check
from stagelaunch.core.config import Deployment, Stage
from stagelaunch.core.config_rules import ENGINE_QWEN3_OMNI
from stagelaunch.core.errors import ConfigError, DoesNotFitNowError, Fault, NeverFitsError, NoDeviceError
from stagelaunch.core.inventory import DeviceInfo, SimulatedMachine
from stagelaunch.core.plan import make_plan
from stagelaunch.core.run_spec import StageRun
from stagelaunch.devices.query import query_devices
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.weights.index import read_index
from stagelaunch.weights.validate import validate

INVENTORY_TIMEOUT_S = 30.0
"""How long the driver may take to list its devices; it can hang in the kernel."""


@dataclass(frozen=True)
class Admitted:
    """What a deployment that may start knows about its machine."""

    devices: dict[int, DeviceInfo]
    """The devices its stages use, by index, as they were before the boot: the baseline that must come back."""
    machine: SimulatedMachine | None
    runs: tuple[StageRun, ...]


async def admit(loaded: LoadedDeployment, machine: SimulatedMachine | None, runtime: Runtime) -> Admitted:
    """Check everything that can be checked without starting a stage; every finding of the first check that fails.

    Raises ConfigError, CheckpointError, NoDeviceError, NeverFitsError or DoesNotFitNowError.
    """
    deployment = loaded.deployment
    _refuse_several_devices(loaded)
    await asyncio.to_thread(check_checkpoint, loaded)
    devices = await used_devices(deployment, machine)
    _refuse_what_does_not_fit(deployment, devices)
    runs = tuple(_stage_run(loaded, stage, devices, machine, runtime) for stage in deployment.stages)
    return Admitted(devices, machine, runs)


def check_checkpoint(loaded: LoadedDeployment) -> None:
    """Every fault of the model directory, as far as the stages of this deployment need it. Reads headers only."""
    components = {
        stage.component: stage.dtype for stage in loaded.deployment.stages if stage.engine == ENGINE_QWEN3_OMNI
    }
    if components:
        validate(read_index(loaded.model_dir), components)


async def used_devices(deployment: Deployment, machine: SimulatedMachine | None) -> dict[int, DeviceInfo]:
    """The devices the stages name, by index, as they are now. NoDeviceError names each that is not there."""
    listed = await query_devices(deployment.backend, machine, INVENTORY_TIMEOUT_S)
    known = {info.index: info for info in listed}
    there = ", ".join(str(index) for index in sorted(known)) or "none"
    missing = tuple(
        f"device {index} is not there: this machine has {there}; name one of them, or start on a machine that has it"
        for index in deployment.device_indices
        if index not in known
    )
    if missing:
        raise NoDeviceError(missing)
    return {index: known[index] for index in deployment.device_indices}


def _refuse_several_devices(loaded: LoadedDeployment) -> None:
    # A stage over several devices plans, but has no ranks yet: say so instead of booting it on one.
    faults = tuple(
        Fault(str(loaded.path), None, f"stages.{stage.name}.devices", "a stage boots on one device; name one")
        for stage in loaded.deployment.stages
        if len(stage.devices) > 1
    )
    if faults:
        raise ConfigError(faults)


def _refuse_what_does_not_fit(deployment: Deployment, devices: dict[int, DeviceInfo]) -> None:
    totals = {index: info.total_bytes for index, info in devices.items()}
    plan = make_plan(deployment, totals)
    if not plan.fits:
        raise NeverFitsError(tuple(plan.findings))
    demands = {stage.id: (stage.devices, stage.demand) for stage in deployment.stages}
    verdicts = device_verdicts(demands, totals, deployment.reserve_bytes)
    free = {index: info.free_bytes for index, info in devices.items()}
    holders = {
        index: tuple(Holder(process.pid, process.size_bytes, name=process.name) for process in info.processes)
        for index, info in devices.items()
    }
    findings = free_check(verdicts, free, holders)
    if findings:
        raise DoesNotFitNowError(tuple(findings))


def _stage_run(
    loaded: LoadedDeployment,
    stage: Stage,
    devices: dict[int, DeviceInfo],
    machine: SimulatedMachine | None,
    runtime: Runtime,
) -> StageRun:
    deployment = loaded.deployment
    info = devices[stage.devices[0]]
    return StageRun(
        deployment=deployment.name,
        stage_id=stage.id,
        name=stage.name,
        backend=deployment.backend,
        device_index=info.index,
        device_uuid=info.uuid,
        machine=machine,
        lock_dir=Path(loaded.lock_dir),
        lock_timeout_s=deployment.timeouts.lock_s,
        engine=stage.engine,
        component=stage.component,
        model_dir=loaded.model_dir,
        dtype=stage.dtype,
        utilization=stage.utilization,
        budget_bytes=stage.budget_bytes,
        max_num_seqs=stage.max_num_seqs,
        max_num_batched_tokens=stage.max_num_batched_tokens,
        max_model_len=stage.max_model_len,
        block_size=stage.block_size,
        capture_sizes=stage.capture_sizes,
        options=stage.options,
        env=_environment(deployment, stage, info),
        log_path=runtime.log(stage.name),
    )


def _environment(deployment: Deployment, stage: Stage, info: DeviceInfo) -> dict[str, str]:
    """The stage's own variables, and the one device it may see: by UUID, in the driver's order."""
    if deployment.backend != "cuda":
        return dict(stage.env)
    return {**stage.env, "CUDA_VISIBLE_DEVICES": info.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
