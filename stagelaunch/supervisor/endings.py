"""How a run ended, as files in the runtime directory: ``state.json`` and ``error.json``. Used by ``supervisor.run``.

Writing them never fails: a full disk or a deleted directory takes nothing away from how it ended.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

from stagelaunch.core import failure
from stagelaunch.core.failure import StageFailure
from stagelaunch.core.outcome import Outcome
from stagelaunch.supervisor.runtime import Runtime, write_atomically

ERROR_VERSION = 1


def note_begin(runtime: Runtime) -> None:
    """The failure of an earlier run is not this one's."""
    with contextlib.suppress(OSError):
        runtime.error.unlink(missing_ok=True)


def note_ending(runtime: Runtime, **how: Any) -> None:
    """The run is over."""
    with contextlib.suppress(OSError):
        runtime.write_state("ended", **how)


def note_outcome(runtime: Runtime, outcome: Outcome, stages: Sequence[dict[str, Any]] = ()) -> None:
    """A run that had started is over. ``stages``: how far each came, as `status` shows it."""
    if outcome.first is not None or outcome.leftovers:
        note_failure(
            runtime, runtime.directory.name, outcome.first, outcome.consequences, outcome.leftovers,
            int(outcome.exit_code),
        )  # fmt: skip
    note_ending(runtime, **ending(outcome), stages=list(stages))


def ending(outcome: Outcome | None) -> dict[str, Any]:
    """How a run ended, as plain JSON."""
    if outcome is None:
        return {"exit_code": None}
    return {
        "exit_code": int(outcome.exit_code),
        "first_failure": None if outcome.first is None else failure.to_json(outcome.first),
        "consequences": [failure.to_json(other) for other in outcome.consequences],
        "leftovers": list(outcome.leftovers),
    }


def note_failure(
    runtime: Runtime,
    deployment: str,
    first: StageFailure | None,
    consequences: Sequence[StageFailure] = (),
    leftovers: Sequence[str] = (),
    exit_code: int | None = None,
) -> None:
    """Write ``error.json``: the first failure, and what came of it as far as that is known. ``exit_code`` None: not yet
    over."""
    body = {
        "version": ERROR_VERSION,
        "deployment": deployment,
        "at": time.time(),
        "exit_code": exit_code,
        "first_failure": None if first is None else failure.to_json(first),
        "consequences": [failure.to_json(other) for other in consequences],
        "leftovers": list(leftovers),
    }
    with contextlib.suppress(OSError):
        write_atomically(runtime.error, json.dumps(body, indent=1))
