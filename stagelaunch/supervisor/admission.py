"""Before anything is spawned: the checkpoint is whole, the devices are there, the plan fits now, and has its claim."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.admission import claim_check, device_verdicts, free_check, free_verdicts
from stagelaunch.core.budgets import Forecasts
from stagelaunch.core.claims import Claim, unattributed_bytes
from stagelaunch.core.config import Deployment, Stage
from stagelaunch.core.engine_spec import spec_of
from stagelaunch.core.errors import (
    AlreadyRunningError,
    CheckpointError,
    ConfigError,
    DoesNotFitNowError,
    Fault,
    NoDeviceError,
)
from stagelaunch.core.identity import same_devices
from stagelaunch.core.inventory import DeviceInfo, SimulatedMachine, machine_name
from stagelaunch.core.need import NO_NEEDS
from stagelaunch.core.plan import Plan, device_holders, make_plan_now, refusal
from stagelaunch.core.run_spec import StageRun
from stagelaunch.core.units import format_duration
from stagelaunch.devices.query import query_devices
from stagelaunch.supervisor.forecast import FORECAST_TIMEOUT_S, ask_needs, forecasts_of, need_requests
from stagelaunch.supervisor.look import begin
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.supervisor.waiting import POLL_S, Patience, with_patience
from stagelaunch.supervisor.weight_plans import check_checkpoint
from stagelaunch.system.claims import Share, admission_mutex, claiming_pid, hold_claims, new_claim_id, read_claims
from stagelaunch.system.locks import LockDirectory
from stagelaunch.weights.plan import WeightPlan


@dataclass(frozen=True)
class Admitted:
    """What a deployment that may start knows about its machine."""

    deployment: Deployment
    """With every device by its number."""
    devices: dict[int, DeviceInfo]
    """The devices its stages use, by number, as they were before the boot: the baseline that must come back."""
    machine: SimulatedMachine | None
    runs: tuple[StageRun, ...]
    weight_plans: Mapping[int, WeightPlan]
    """What each stage of our own engine reads, by its id."""


async def admit(
    loaded: LoadedDeployment,
    machine: SimulatedMachine | None,
    runtime: Runtime,
    lock_dir: LockDirectory,
    held: ExitStack,
    patience: Patience | None = None,
) -> Admitted:
    """Check everything that can be checked without starting a stage; every finding of the first check that fails.

    The claim on its devices is made with that and is on ``held``, to be let go of when their memory is back. With
    ``patience`` a plan that does not fit now is tried again. Raises ConfigError, CheckpointError, NoDeviceError,
    NeverFitsError, DoesNotFitNowError, AdmissionTimeoutError, LockTimeoutError, LockDirectoryError or
    AlreadyRunningError.
    """
    _refuse_several_devices(loaded)
    loaded, plans = await _look_at_checkpoint(loaded)
    requests = need_requests(loaded, auto_only=True)
    needs = await ask_needs(requests, FORECAST_TIMEOUT_S) if requests else NO_NEEDS
    forecasts = forecasts_of(needs, machine)

    async def attempt() -> Admitted:
        deployment = loaded.deployment
        async with admission_mutex(lock_dir, deployment.name, deployment.timeouts.lock_s):
            return await _admit_now(loaded, machine, runtime, lock_dir, held, plans, forecasts)

    return await with_patience(patience, attempt)


async def _look_at_checkpoint(loaded: LoadedDeployment) -> tuple[LoadedDeployment, dict[int, WeightPlan]]:
    """As long as a boot may take: a disk, or a network, may never answer."""
    wait_s = loaded.deployment.timeouts.boot_s
    try:
        async with asyncio.timeout(wait_s):
            loaded = await begin(loaded.with_model_as_it_is)
            return loaded, await begin(lambda: check_checkpoint(loaded))
    except TimeoutError:
        text = f"cannot be looked at: the disk does not answer within {format_duration(wait_s)}; check what is mounted"
        raise CheckpointError((Fault(str(loaded.model_dir), None, None, f"{text} there"),)) from None


async def _admit_now(
    loaded: LoadedDeployment,
    machine: SimulatedMachine | None,
    runtime: Runtime,
    lock_dir: LockDirectory,
    held: ExitStack,
    weight_plans: Mapping[int, WeightPlan],
    forecasts: Forecasts,
) -> Admitted:
    """Read what is free and claimed, decide, claim; under the admission mutex."""
    written = loaded.deployment
    refuse_if_claimed(lock_dir, written.name, runtime)
    inventory = await query_devices(written.backend, machine, written.timeouts.driver_s)
    resolved = loaded.resolve(inventory, os.environ)
    deployment = written.on_devices(resolved.numbers)
    devices = {info.index: info for info in resolved.devices if info.index in deployment.device_indices}
    claims = {index: read_claims(lock_dir, info.uuid, machine_name(machine)) for index, info in devices.items()}
    weights = {stage_id: plan.total_bytes for stage_id, plan in weight_plans.items()}
    plan = make_plan_now(written, resolved, claims, weights, forecasts)
    if (error := refusal(plan)) is not None:
        raise error
    claim_id = new_claim_id()
    shares = _shares(plan, devices, claims)
    machine_text = machine_name(machine)
    held.enter_context(hold_claims(lock_dir, claim_id, deployment.name, shares, machine_text, runtime.identity))
    runs = tuple(
        _stage_run(
            loaded, stage, devices, machine, runtime, claim_id, plan.auto_budget_bytes(stage), stage.id in weight_plans
        )
        for stage in deployment.stages
    )
    return Admitted(deployment, devices, machine, runs, weight_plans)


async def readmit(admitted: Admitted, stage_id: int, lock_dir: LockDirectory, wait_s: float) -> None:
    """Returns when the stage, which is to be started again, fits beside what is held and what others have claimed.

    Waits so long for its memory to be back. Raises DoesNotFitNowError, NoDeviceError, LockTimeoutError or
    LockDirectoryError. The deployment's claim stands all the while.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            async with admission_mutex(lock_dir, admitted.deployment.name, admitted.deployment.timeouts.lock_s):
                return await _readmit_now(admitted, stage_id, lock_dir)
        except DoesNotFitNowError:
            if time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(POLL_S)


async def _readmit_now(admitted: Admitted, stage_id: int, lock_dir: LockDirectory) -> None:
    run = next(run for run in admitted.runs if run.stage_id == stage_id)
    index, reserve_bytes = run.device_index, admitted.deployment.reserve_bytes
    before = {index: admitted.devices[index]}
    now = await devices_now(before, run.backend, admitted.machine, admitted.deployment.timeouts.driver_s)
    if index not in now:
        raise NoDeviceError((f"device {index}: cannot be read any more",))
    info = now[index]
    budget = run.budget_bytes if run.budget_bytes is not None else run.utilization
    assert budget is not None
    others = [
        claim
        for claim in read_claims(lock_dir, info.uuid, machine_name(admitted.machine))
        if claim.claim_id != run.claim_id
    ]
    verdicts = device_verdicts({stage_id: ((index,), budget)}, {index: info.total_bytes}, reserve_bytes)
    free = free_verdicts(verdicts, {index: info.free_bytes}, {index: device_holders(info)}, {index: others})
    if findings := (*free_check(free), *claim_check(free)):
        raise DoesNotFitNowError(findings)


def _shares(plan: Plan, devices: Mapping[int, DeviceInfo], claims: Mapping[int, tuple[Claim, ...]]) -> dict[str, Share]:
    """What the plan was admitted with, by device UUID."""
    needs = {device.verdict.device: device.verdict.needed_bytes or 0 for device in plan.devices}
    return {
        info.uuid: Share(
            needs[index],
            unattributed_bytes(info.total_bytes - info.free_bytes, device_holders(info), claims[index]),
        )
        for index, info in devices.items()
    }


def refuse_if_claimed(lock_dir: os.PathLike[str], deployment: str, runtime: Runtime) -> None:
    """AlreadyRunningError when a supervisor of this very deployment lives that has lost its runtime directory.

    With the directory its lock was deleted, so that a second start gets a lock of its own.
    """
    pid = claiming_pid(lock_dir, deployment, runtime.identity)
    if pid is not None:
        raise AlreadyRunningError(
            f"cannot start deployment {deployment}: it is running already (supervisor pid {pid}), although "
            f"{runtime.directory} was deleted; stop it with `stagelaunch down {runtime.argument}`"
        )


async def devices_now(
    before: dict[int, DeviceInfo], backend: str, machine: SimulatedMachine | None, timeout_s: float
) -> dict[int, DeviceInfo]:
    """The same devices as they are now, by their numbers of then; those only are asked.

    One that is gone or does not answer is left out; NoDeviceError when none can be read.
    """
    listed = await query_devices(backend, machine, timeout_s, [info.uuid for info in before.values()])
    return same_devices(before, listed.devices)


def _refuse_several_devices(loaded: LoadedDeployment) -> None:
    # A stage over several devices plans, but has no ranks yet: say so instead of booting it on one.
    faults = tuple(
        Fault(str(loaded.path), None, f"stages.{stage.name}.devices", "a stage boots on one device; name one")
        for stage in loaded.deployment.stages
        if len(stage.devices) > 1
    )
    if faults:
        raise ConfigError(faults)


def _stage_run(
    loaded: LoadedDeployment,
    stage: Stage,
    devices: dict[int, DeviceInfo],
    machine: SimulatedMachine | None,
    runtime: Runtime,
    claim_id: str,
    auto_budget_bytes: int | None,
    has_weight_plan: bool,
) -> StageRun:
    deployment = loaded.deployment
    info = devices[stage.device_indices[0]]
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
        spec=replace(
            spec_of(stage, loaded.model_dir), plan_file=runtime.weight_plan(stage.name) if has_weight_plan else None
        ),
        utilization=stage.utilization,
        budget_bytes=stage.budget if isinstance(stage.budget, int) else auto_budget_bytes,
        budget_is_auto=auto_budget_bytes is not None,
        env=_environment(deployment, stage, info),
        log_path=runtime.log(stage.name),
        claim_id=claim_id,
    )


def _environment(deployment: Deployment, stage: Stage, info: DeviceInfo) -> dict[str, str]:
    """The stage's own variables, and the one device it may see: by UUID, in the driver's order."""
    if deployment.backend != "cuda":
        return dict(stage.env)
    return {**stage.env, "CUDA_VISIBLE_DEVICES": info.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
