"""What an earlier boot learnt about a stage: by how much its graphs exceed their estimate.

Kept beside the deployment's other files, by the hash of everything that could change the figure: a stage that is
planned differently starts without. A file that cannot be read is worth a line, never a boot.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from stagelaunch.core.run_spec import StageRun, runs_to_json
from stagelaunch.supervisor.runtime import write_atomically
from stagelaunch.system.regular import read_regular

_IRRELEVANT = ("deployment", "claim_id", "lock_dir", "lock_timeout_s", "log_path", "graphs_correction_bytes",
    "plan_file", "reading",
)  # fmt: skip
"""Parts of a run, or of its spec, that do not change what its graphs take."""


def plan_key(run: StageRun) -> str:
    """The same for two runs of one plan: same stage, device, budget, engine and settings."""
    (body,) = json.loads(runs_to_json((run,)))
    body["spec"] = {name: value for name, value in body["spec"].items() if name not in _IRRELEVANT}
    relevant = {name: value for name, value in body.items() if name not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def remember(path: Path, runs: tuple[StageRun, ...]) -> None:
    """Write down the corrections of these runs, in place of what was known before."""
    found = {plan_key(run): run.graphs_correction_bytes for run in runs if run.graphs_correction_bytes}
    write_atomically(path, json.dumps(found))


def recall(path: Path, runs: tuple[StageRun, ...]) -> tuple[tuple[StageRun, ...], tuple[str, ...]]:
    """The runs with what is known about them, and what to say about it."""
    try:
        known = _read(path)
    except FileNotFoundError:
        return runs, ()
    except (OSError, ValueError, RecursionError) as error:
        return runs, (f"corrections of earlier boots in {path} are ignored: {error}",)
    corrected = tuple(replace(run, graphs_correction_bytes=known.get(plan_key(run), 0)) for run in runs)
    return corrected, ()


def _read(path: Path) -> dict[str, int]:
    known = json.loads(read_regular(path))
    if not isinstance(known, dict) or not all(type(size) is int and 0 < size < 2**53 for size in known.values()):
        raise ValueError("it is not a list of sizes by plan")
    return known
