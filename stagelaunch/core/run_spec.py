"""What a worker is told before it starts: one JSON file per run, read by every worker of the deployment.

A file, not arguments: ``Process.start`` can hang for ever on large pickled arguments when the child dies at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stagelaunch.core.engine_spec import EngineSpec, spec_from_json
from stagelaunch.core.inventory import SimulatedMachine
from stagelaunch.core.ledger import Ledger
from stagelaunch.core.messages import ledger_from_json


@dataclass(frozen=True)
class StageRun:
    """Everything one worker needs to boot its stage. Paths are absolute."""

    deployment: str
    stage_id: int
    name: str
    backend: str
    device_index: int
    device_uuid: str
    machine: SimulatedMachine | None
    lock_dir: Path
    lock_timeout_s: float
    engine: str
    spec: EngineSpec
    utilization: float | None
    budget_bytes: int | None
    env: Mapping[str, str]
    """Set in the worker before any library is imported."""
    log_path: Path
    claim_id: str
    """Of the claim that the deployment was admitted with; the worker says that its memory counts for it."""
    budget_is_auto: bool = False
    """``budget_bytes`` was worked out, not written."""
    graphs_correction_bytes: int = 0
    """What an earlier capture of this stage took beyond its estimate, and 5 % more."""
    grounds: Mapping[str, str] = field(default_factory=dict)
    """What everything that is measured of the stage rests on, by name."""
    remembered: Ledger | None = None
    """What an earlier boot on the same grounds ended with."""
    reuse_plan: bool = False
    """Boot by what is remembered."""

    @property
    def plan(self) -> Ledger | None:
        """What to boot by instead of measuring; None: measure."""
        return self.remembered if self.reuse_plan else None


def runs_to_json(runs: tuple[StageRun, ...]) -> str:
    """The text of the run file."""
    return json.dumps([_plain(asdict(run)) for run in runs], indent=1)


def run_from_json(text: str, stage_id: int) -> StageRun:
    """The entry of ``stage_id``. KeyError when the file has none."""
    for body in json.loads(text):
        if body["stage_id"] == stage_id:
            return _stage_run(body)
    raise KeyError(stage_id)


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case Path():
            return str(value)
        case _:
            return value


def _stage_run(body: dict[str, Any]) -> StageRun:
    machine = body["machine"]
    if machine is not None:
        totals = {int(index): int(total) for index, total in machine["total_bytes"].items()}
        machine = SimulatedMachine(**{**machine, "path": Path(machine["path"]), "total_bytes": totals})
    paths = {name: Path(body[name]) for name in ("lock_dir", "log_path")}
    remembered = None if body["remembered"] is None else ledger_from_json(body["remembered"])
    known = {**paths, "machine": machine, "remembered": remembered}
    return StageRun(**{**body, **known, "spec": spec_from_json(body["spec"])})
