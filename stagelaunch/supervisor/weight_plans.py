"""What each stage reads of the checkpoint, worked out once for all and written down for their processes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from stagelaunch.config_file import LoadedDeployment
from stagelaunch.core.config import Stage
from stagelaunch.core.config_rules import ENGINE_QWEN3_OMNI
from stagelaunch.core.errors import ConfigError, Fault
from stagelaunch.core.reading import Backend
from stagelaunch.core.run_spec import StageRun
from stagelaunch.supervisor.runtime import write_atomically
from stagelaunch.weights.index import read_index
from stagelaunch.weights.plan import WeightPlan, plan_valid
from stagelaunch.weights.plan_file import plan_to_json
from stagelaunch.weights.validate import require_data, validate


def check_checkpoint(loaded: LoadedDeployment) -> dict[int, WeightPlan]:
    """What each stage of our own engine reads, by its id. Reads headers only.

    Raises ConfigError for a reader that is not installed; CheckpointError with every fault the stages would run into.
    """
    stages = [stage for stage in loaded.deployment.stages if stage.engine == ENGINE_QWEN3_OMNI]
    _refuse_missing_backends(loaded, stages)
    if not stages:
        return {}
    index = read_index(loaded.model_dir)
    require_data(index)
    validate(index, {stage.component: stage.dtype for stage in stages})
    plans = {component: plan_valid(index, component) for component in {stage.component for stage in stages}}
    return {stage.id: plans[stage.component] for stage in stages}


def write_plans(runs: tuple[StageRun, ...], plans: Mapping[int, WeightPlan]) -> None:
    """Write each stage's plan where its run says. OSError when that cannot be."""
    for run in runs:
        path = run.spec.plan_file
        if path is not None:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, plan_to_json(plans[run.stage_id]))


def _refuse_missing_backends(loaded: LoadedDeployment, stages: list[Stage]) -> None:
    faults = []
    for stage in stages:
        module = Backend(stage.weights.backend).module
        if module is not None and find_spec(module) is None:
            text = f"{module} is not installed; pip install {module} into this environment, or set it to auto"
            faults.append(Fault(str(loaded.path), None, f"stages.{stage.name}.weights.backend", text))
    if faults:
        raise ConfigError(tuple(faults))
