"""A plan as plain JSON: what ``plan --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagelaunch.core.claims import HeldClaim
from stagelaunch.core.ledger import ledger_to_json
from stagelaunch.core.phases import STEPS
from stagelaunch.core.plan import DevicePlan, Plan


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON; sizes in bytes, null where unknown."""
    names = {stage.stage: stage.name for stage in plan.stages}
    return {
        "deployment": plan.deployment,
        "backend": plan.backend,
        "order": plan.order,
        "groups": [list(group) for group in plan.groups],
        "stages": [
            {
                "stage": stage.stage,
                "name": stage.name,
                "devices": list(stage.devices),
                "capture_sizes": list(stage.capture_sizes),
                "weights_bytes": stage.weights_bytes,
                "forecast": None if stage.forecast is None else ledger_to_json(stage.forecast),
                "kv_bytes_per_token": None if stage.layout is None else stage.layout.bytes_per_token,
                "forecast_error": stage.forecast_error,
            }
            for stage in plan.stages
        ],
        "devices": [_device_json(device, names) for device in plan.devices],
        "steps": [
            {"phase": str(step.phase), "step": step.name, "lock": str(step.lock), "why": step.why} for step in STEPS
        ],
        "findings": list(plan.findings),
        "fits": plan.fits,
    }


def _device_json(device: DevicePlan, names: Mapping[int, str]) -> dict[str, Any]:
    verdict, free = device.verdict, device.free
    return {
        "id": verdict.device,
        "uuid": device.uuid,
        "total_bytes": verdict.total_bytes,
        "demands": [
            {
                "stage": demand.stage_id,
                "name": names[demand.stage_id],
                "budget_bytes": demand.budget_bytes,
                "reserve_bytes": verdict.reserve_bytes,
            }
            for demand in verdict.demands
        ],
        "reserve_bytes": verdict.reserve_bytes,
        "needed_bytes": verdict.needed_bytes,
        "shortfall_bytes": verdict.shortfall_bytes,
        "left_bytes": device.left_bytes,
        "free_bytes": None if free is None else free.free_bytes,
        "available_bytes": None if free is None else free.available_bytes,
        "shortfall_now_bytes": None if free is None else free.shortfall_bytes,
        "claims": None if free is None else [_claim_json(held) for held in free.claims],
    }


def _claim_json(held: HeldClaim) -> dict[str, Any]:
    claim = held.claim
    return {
        "deployment": claim.deployment,
        "supervisor_pid": claim.pid,
        "claimed_bytes": claim.claimed_bytes,
        "held_bytes": held.held_bytes,
    }
