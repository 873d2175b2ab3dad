"""A stage's plan of its weights as a file: the supervisor reads all headers once, a worker only what concerns it.

Not for keeping: a plan holds for the run it was made for, and for files that have not changed since. Its checksum comes
first: reads that are not the plan's would leave parameters as they are, and nobody would see it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from stagelaunch.core.errors import StageError
from stagelaunch.system.regular import read_regular
from stagelaunch.weights.index import FileStamp
from stagelaunch.weights.plan import ReadItem, TargetSpec, WeightPlan


def plan_to_json(plan: WeightPlan) -> str:
    """The text of the plan file. Paths and targets are in it once: there are many thousand items."""
    shards = {shard: place for place, shard in enumerate(dict.fromkeys(item.shard for item in plan.items))}
    targets = {name: place for place, name in enumerate(plan.targets)}
    body = {
        "component": plan.component,
        "total_bytes": plan.total_bytes,
        "headers_only": plan.headers_only,
        "stamps": [[str(path), *stamp] for path, stamp in plan.stamps.items()],
        "shards": [str(shard) for shard in shards],
        "targets": [[name, spec.shape, spec.dtype] for name, spec in plan.targets.items()],
        "items": [
            [shards[item.shard], item.begin, item.end, targets[item.target], item.target_offset, item.name]
            for item in plan.items
        ],
    }
    text = json.dumps(body, separators=(",", ":"))
    return f"{_checksum(text.encode())}\n{text}"


def read_plan(path: Path) -> WeightPlan:
    """The plan in a file that ``plan_to_json`` gave. StageError when it cannot be read or is something else."""
    try:
        checksum, _, text = read_regular(path).partition(b"\n")
        if checksum.decode() != _checksum(text):
            raise ValueError("its checksum is wrong")
        return _plan(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise StageError(f"cannot read the stage's plan of its weights {path}: {error!r:.200}; boot again") from error


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _plan(body: dict[str, Any]) -> WeightPlan:
    shards = [Path(shard) for shard in body["shards"]]
    targets = {name: TargetSpec(tuple(shape), dtype) for name, shape, dtype in body["targets"]}
    names = list(targets)
    return WeightPlan(
        component=body["component"],
        items=tuple(
            ReadItem(shards[shard], begin, end, names[target], offset, name)
            for shard, begin, end, target, offset, name in body["items"]
        ),
        targets=targets,
        total_bytes=body["total_bytes"],
        headers_only=body["headers_only"],
        stamps={Path(path): FileStamp(size, mtime) for path, size, mtime in body["stamps"]},
    )
