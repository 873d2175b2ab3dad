"""What boots of a deployment have taught about its stages, in one file beside its other ones, for the next boot.

One entry a stage: by how much its graphs exceed their estimate, and how its last boot ended. It counts on the same
grounds only (``supervisor.grounds``). A file that is not ours, not whole, or of another version is worth a line, never
a boot. The rules are in ``core.remembered``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stagelaunch.core.messages import ledger_from_json
from stagelaunch.core.remembered import Remembered, changed, flaw
from stagelaunch.core.run_spec import StageRun
from stagelaunch.system.regular import read_own
from stagelaunch.weights.faults import printable

VERSION = 1
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Recalled:
    """The runs with what is known about them, and what to say about that."""

    runs: tuple[StageRun, ...]
    remarks: tuple[str, ...] = ()


def remember(path: Path, runs: tuple[StageRun, ...]) -> None:
    """Write down what these runs know, in place of what was there: whole or not at all, for this user only. OSError."""
    entries = {run.name: Remembered(run.grounds, run.graphs_correction_bytes, run.remembered) for run in runs}
    plain = {name: asdict(entry) for name, entry in entries.items()}
    _write_own(path, json.dumps({"version": VERSION, "checksum": _checksum(plain), "stages": plain}))


def recall(path: Path, runs: tuple[StageRun, ...], *, reuse: bool) -> Recalled:
    """What the file knows about these runs, each on its own grounds. ``reuse``: they boot by it; say which do."""
    try:
        known = _read(path)
    except FileNotFoundError:
        known = {}
    except (OSError, ValueError) as error:
        why = printable(str(error.strerror if isinstance(error, OSError) else error))
        return Recalled(runs, (f"what earlier boots have measured is ignored: {path}: {why}",))
    reasons = {run.name: _why_not(known.get(run.name), run) for run in runs}
    found = tuple(run if reasons[run.name] else _knowing(run, known[run.name], reuse=reuse) for run in runs)
    return Recalled(found, _remarks(found, reasons) if reuse else ())


def _knowing(run: StageRun, entry: Remembered, *, reuse: bool) -> StageRun:
    return replace(
        run, graphs_correction_bytes=entry.correction_bytes, remembered=entry.ledger, reuse_plan=reuse
    )  # fmt: skip


def _why_not(entry: Remembered | None, run: StageRun) -> str | None:
    """Why an entry does not count for a run; None for one that does."""
    if entry is None:
        return "no earlier boot is remembered"
    if names := changed(entry.grounds, run.grounds):
        return f"changed since: {printable(', '.join(names))}"
    return None if (text := flaw(entry)) is None else f"what is remembered cannot be: it {text}"


def _remarks(runs: tuple[StageRun, ...], reasons: Mapping[str, str | None]) -> tuple[str, ...]:
    """One line for all stages that boot by a plan, one for each reason why others do not."""
    by_reason: dict[str, list[str]] = {}
    for run in runs:
        if run.plan is None:
            by_reason.setdefault(reasons[run.name] or "no boot of it is remembered that ended well", []).append(
                run.name
            )
    planned = [run.name for run in runs if run.plan is not None]
    lines = [f"boots by what an earlier boot has measured: {', '.join(planned)}"] if planned else []
    return (*lines, *(f"measures {', '.join(names)}: {reason}" for reason, names in by_reason.items()))


def _read(path: Path) -> dict[str, Remembered]:
    """Every entry. ValueError for what we have not written, FileNotFoundError where there is nothing, OSError."""
    try:
        body = json.loads(read_own(path, MAX_BYTES))
        if body["version"] != VERSION:
            raise ValueError(f"it is of version {body['version']!r}, this is {VERSION}")
        if body["checksum"] != _checksum(body["stages"]):
            raise ValueError("its checksum is wrong")
        return {name: _entry(entry) for name, entry in body["stages"].items()}
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not what a boot leaves ({error!r})") from error


def _entry(body: Mapping[str, Any]) -> Remembered:
    ledger = None if body["ledger"] is None else ledger_from_json(body["ledger"])
    if not all(isinstance(ground, str) for ground in body["grounds"].values()):
        raise TypeError("grounds are no texts")
    return Remembered(dict(body["grounds"]), int(body["correction_bytes"]), ledger)


def _checksum(stages: Any) -> str:
    return hashlib.sha256(json.dumps(stages, sort_keys=True).encode()).hexdigest()


def _write_own(path: Path, text: str) -> None:
    """Replace the file. The draft is a new file of ours, whatever lies at its path."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
