"""The state of a deployment as JSON: what ``status`` prints and the control socket answers."""

from __future__ import annotations

import os
from typing import Any

from stagelaunch.core.board import StageView
from stagelaunch.core.config import Deployment
from stagelaunch.core.failure import StageFailure
from stagelaunch.core.inventory import DeviceInfo, device_to_json
from stagelaunch.core.launch import Mode
from stagelaunch.core.ledger import ledger_to_json
from stagelaunch.supervisor.control_socket import API_VERSION
from stagelaunch.supervisor.supervisor import Supervisor


def status_body(
    deployment: Deployment,
    supervisor: Supervisor,
    before: dict[int, DeviceInfo],
    now: dict[int, DeviceInfo],
    at_s: float,
) -> dict[str, Any]:
    """Everything known about a running deployment; sizes in bytes, times in seconds."""
    return {
        "version": API_VERSION,
        "name": deployment.name,
        "state": deployment_state(supervisor),
        "pid": os.getpid(),
        "elapsed_s": at_s - supervisor.began_s,
        "boot_s": None if supervisor.ready_at_s is None else supervisor.ready_at_s - supervisor.began_s,
        "stages": stage_bodies(deployment, supervisor, at_s),
        "devices": [
            {**device_to_json(now[index]), "free_before_bytes": before[index].free_bytes} for index in sorted(now)
        ],
    }


def health_body(deployment: Deployment, supervisor: Supervisor, at_s: float) -> dict[str, Any]:
    """How far each stage is and whether anything has failed; known without asking anybody."""
    pids, views, first = supervisor.stages.pids(), supervisor.stages.views(), supervisor.state.first_failure
    return {
        "version": API_VERSION,
        "name": deployment.name,
        "state": deployment_state(supervisor),
        "pid": os.getpid(),
        "elapsed_s": at_s - supervisor.began_s,
        "healthy": first is None,
        "ready": supervisor.state.is_ready,
        "first_failure": first.cause.headline() if first and isinstance(first.cause, StageFailure) else None,
        "stages": [_stage_health(stage.name, pids.get(stage.id), views[stage.id], at_s) for stage in deployment.stages],
    }


def _stage_health(name: str, pid: int | None, view: StageView | None, at_s: float) -> dict[str, Any]:
    phase, since_s = (None, None) if view is None else (view.phase, at_s - view.phase_began_s)
    return {"name": name, "pid": pid, "phase": phase, "phase_elapsed_s": since_s}


def stage_bodies(deployment: Deployment, supervisor: Supervisor, at_s: float) -> list[dict[str, Any]]:
    """Every stage of the deployment, in the order of its file."""
    pids, views, state = supervisor.stages.pids(), supervisor.stages.views(), supervisor.state
    return [
        {
            **_stage(stage.id, stage.name, stage.device_indices[0], pids.get(stage.id), views[stage.id], at_s),
            "state": state.stages[stage.id],
            "restarts": len(state.restarts.get(stage.id, ())),
        }
        for stage in deployment.stages
    ]


def deployment_state(supervisor: Supervisor) -> str:
    """``booting``, ``ready``, ``restarting`` (a stage of it, after the boot) or ``stopping``."""
    if supervisor.state.is_ready:
        return "ready"
    if supervisor.state.mode is Mode.STOPPING:
        return "stopping"
    return "restarting" if supervisor.state.was_ready else "booting"


def _stage(
    stage_id: int, name: str, device: int, pid: int | None, view: StageView | None, at_s: float
) -> dict[str, Any]:
    body: dict[str, Any] = {"id": stage_id, "name": name, "device": device, "pid": pid, "phase": None, "ledger": None}
    if view is None:
        return body
    return {
        **body,
        "phase": view.phase,
        "phase_elapsed_s": at_s - view.phase_began_s,
        "waits_for": list(view.lock_holders) if view.lock_wait_since_s is not None else None,
        "progress": None
        if view.progress is None
        else {"done": view.progress.done, "total": view.progress.total, "unit": view.progress.unit},
        "ledger": None if view.ledger is None else ledger_to_json(view.ledger),
        "ledger_is_final": view.ledger_is_final,
        "phases": [
            {"phase": s.phase, "took_s": s.ended_s - s.began_s, "waited_s": s.waited_s, "began_s": s.began_s}
            for s in view.spans
        ],
    }
