"""The rules a launch goes by, as the config says them. Used by the supervisor's process driver."""

from __future__ import annotations

from stagelaunch.core.board import Timeouts
from stagelaunch.core.config import Deployment
from stagelaunch.core.groups import init_groups
from stagelaunch.core.launch_model import LaunchPolicy, OnFailure, Order
from stagelaunch.core.restarts import RestartBudget
from stagelaunch.core.stop_plan import StopPlan


def launch_policy(deployment: Deployment, stop: StopPlan) -> LaunchPolicy:
    """In which order stages start, and what follows from a failure."""
    return LaunchPolicy(
        groups=tuple(tuple(group) for group in init_groups(deployment.stage_devices)),
        order=Order(deployment.order),
        max_running_groups=None,
        on_failure=OnFailure.STOP,
        ladder=stop.ladder,
        restarts=restart_budget(deployment) if deployment.on_failure == "restart-stage" else None,
    )


def restart_budget(deployment: Deployment) -> RestartBudget:
    """How often a deployment, or a stage of it, may be started again."""
    given = deployment.restarts
    return RestartBudget(given.max_restarts, given.within_s, given.backoff_s, given.backoff_max_s)


def timeouts(deployment: Deployment) -> Timeouts:
    """Until when a stage must have got on."""
    limits = deployment.timeouts
    return Timeouts(limits.phase_s, limits.stage_s, limits.boot_s, limits.lock_s, limits.heartbeat_s)
