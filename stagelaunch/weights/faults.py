"""Collects what is wrong with a checkpoint, to be raised as one error of readable length."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stagelaunch.core.errors import CheckpointError, Fault

SHOWN_PER_KIND = 5


@dataclass
class FaultList:
    """Collects faults; of each kind the first few are kept and the rest counted.

    One wrong line in a config makes ten thousand tensors wrong: the reader needs five of them and the number.
    """

    by_kind: dict[str, list[Fault]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, file: Path, key: str | None, text: str, line: int | None = None) -> None:
        """Note one fault. ``kind`` completes "... and 12 more: " when there are many."""
        shown = self.by_kind.setdefault(kind, [])
        if len(shown) < SHOWN_PER_KIND:
            shown.append(Fault(printable(str(file)), line, None if key is None else printable(key), text))
        else:
            self.left_out[kind] = self.left_out.get(kind, 0) + 1

    def extend(self, other: FaultList) -> None:
        """Take over what another list collected, as it stands."""
        for kind, shown in other.by_kind.items():
            self.by_kind.setdefault(kind, []).extend(shown)
        for kind, count in other.left_out.items():
            self.left_out[kind] = self.left_out.get(kind, 0) + count

    def raise_if_any(self) -> None:
        """CheckpointError with everything collected; nothing if there was nothing."""
        faults: list[Fault] = []
        for kind, shown in self.by_kind.items():
            faults += shown
            if count := self.left_out.get(kind):
                faults.append(Fault(shown[-1].file, None, None, f"... and {count:,} more: {kind}"))
        if faults:
            raise CheckpointError(tuple(faults))


def printable(text: str) -> str:
    """``text`` on one line of at most 200 characters. Names come from files: they may hold newlines or surrogates."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 200 else text[:197] + "..."
