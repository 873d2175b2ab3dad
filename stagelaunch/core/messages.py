"""What a worker and its supervisor say to each other: one JSON object a line over a socket pair.

``encode`` and ``decode`` are inverse. Times are CLOCK_MONOTONIC seconds, which all processes of a machine share.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from stagelaunch.core.ledger import Ledger, Source, Term
from stagelaunch.core.phases import LockMode, Phase


@dataclass(frozen=True)
class PhaseBegan:
    """The worker entered a phase."""

    phase: Phase
    at_s: float


@dataclass(frozen=True)
class LockWaits:
    """The worker waits for a device lock; ``holders`` says who has it, as text."""

    phase: Phase
    mode: LockMode
    holders: tuple[str, ...]
    at_s: float


@dataclass(frozen=True)
class LockTaken:
    """The worker has the lock it waited for."""

    phase: Phase
    mode: LockMode
    waited_s: float
    at_s: float


@dataclass(frozen=True)
class LockReleased:
    """The worker has let go of the lock. ``at_s`` is from before it did: nobody else can have had it earlier."""

    phase: Phase
    mode: LockMode
    at_s: float


@dataclass(frozen=True)
class PhaseEnded:
    """The worker left a phase. ``waited_s`` of it went into waiting for locks."""

    phase: Phase
    at_s: float
    waited_s: float


@dataclass(frozen=True)
class Progress:
    """How far a phase is; ``unit`` is ``bytes`` or ``graphs``."""

    phase: Phase
    done: int
    total: int
    unit: str
    at_s: float


@dataclass(frozen=True)
class LedgerKnown:
    """The stage's ledger: after sizing with the estimated graph term, after capture with the measured one."""

    ledger: Ledger
    final: bool


@dataclass(frozen=True)
class Ready:
    """The stage answers probes from now on."""

    at_s: float


@dataclass(frozen=True)
class Failed:
    """The stage gives up; the process exits after this."""

    phase: Phase
    error: str
    """Class name of the exception."""
    text: str
    traceback: str
    exit_code: int
    """What the deployment should exit with, for an error of ours; 1 otherwise."""
    at_s: float
    retry: bool = False
    """Worth one more try in a fresh process."""
    overshoot_bytes: int = 0
    """How far the stage exceeded its budget, for one that did."""


@dataclass(frozen=True)
class Probed:
    """Answer to Probe."""

    request_id: int
    batch_size: int
    through_graph: bool
    max_abs_diff: float
    output_shape: tuple[int, ...]
    elapsed_s: float
    error: str | None = None


@dataclass(frozen=True)
class Probe:
    """Supervisor to worker: run one step and compare."""

    request_id: int


@dataclass(frozen=True)
class Ping:
    """Supervisor to worker: are you there? While it boots its control thread answers; once ready, its main loop."""

    request_id: int


@dataclass(frozen=True)
class Pong:
    """Answer to Ping."""

    request_id: int


@dataclass(frozen=True)
class ReopenLog:
    """Supervisor to worker: the log file was put aside; open it anew by its name."""


@dataclass(frozen=True)
class DumpStacks:
    """Supervisor to worker: write the stacks of all threads to the log, and go on."""


@dataclass(frozen=True)
class StacksDumped:
    """Answer to DumpStacks, of the control thread: no sign that the stage gets on."""


@dataclass(frozen=True)
class LogLost:
    """The worker's log file cannot be opened; ``text`` says why and where its output goes now. Said once."""

    text: str


@dataclass(frozen=True)
class Stop:
    """Supervisor to worker: let go of the device and leave."""


Message = (
    PhaseBegan
    | LockWaits
    | LockTaken
    | LockReleased
    | PhaseEnded
    | Progress
    | LedgerKnown
    | Ready
    | Failed
    | Probed
    | Probe
    | Stop
    | Ping
    | Pong
    | ReopenLog
    | DumpStacks
    | StacksDumped
    | LogLost
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}


def encode(message: Message) -> bytes:
    """One line of JSON, newline included."""
    body = {"kind": type(message).__name__, **asdict(message)}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of one line. ValueError for anything that is not one."""
    try:
        body = json.loads(line)
        kind = _KINDS[body.pop("kind")]
        return _build(kind, body)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a message: {line[:200]!r} ({error!r})") from error


def _build(kind: type[Any], body: dict[str, Any]) -> Message:
    if "phase" in body:
        body["phase"] = Phase(body["phase"])
    if "mode" in body:
        body["mode"] = LockMode(body["mode"])
    for name in ("holders", "output_shape"):
        if name in body:
            body[name] = tuple(body[name])
    if "ledger" in body:
        body["ledger"] = ledger_from_json(body["ledger"])
    message: Message = kind(**body)
    for part in fields(message):
        value, wanted = getattr(message, part.name), _PLAIN.get(str(part.type))
        if wanted is not None and not isinstance(value, wanted):
            raise TypeError(f"{part.name} is {value!r}")
    return message


_PLAIN: dict[str, type | tuple[type, ...]] = {"float": (int, float), "int": int, "str": str, "bool": bool}
"""What JSON may hold for a field; a worker that says something else has lost its mind, not its stage's data."""


def ledger_from_json(body: dict[str, Any]) -> Ledger:
    """Inverse of ``dataclasses.asdict(ledger)`` after JSON."""
    terms = {name: _term(value) for name, value in body.items() if isinstance(value, dict)}
    return Ledger(
        num_blocks=int(body["num_blocks"]),
        block_bytes=int(body["block_bytes"]),
        graphs_estimate_bytes=int(body["graphs_estimate_bytes"]),
        held_bytes=_optional_int(body["held_bytes"]),
        **terms,
    )


def _term(body: dict[str, Any]) -> Term:
    return Term(int(body["size_bytes"]), Source(body["source"]), _optional_int(body["other_bytes"]))


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)
