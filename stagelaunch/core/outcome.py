"""How a deployment ended, and what its process exits with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stagelaunch.core.errors import ExitCode
from stagelaunch.core.failure import StageFailure
from stagelaunch.core.inventory import DeviceInfo
from stagelaunch.core.units import format_size


@dataclass(frozen=True)
class Outcome:
    """The end of a deployment. ``leftovers`` name processes and device memory that are still there."""

    first: StageFailure | None
    consequences: tuple[StageFailure, ...]
    was_ready: bool
    interrupted: bool
    """Ctrl-C, as opposed to ``down`` or SIGTERM."""
    leftovers: tuple[str, ...]

    @property
    def exit_code(self) -> ExitCode:
        """A leftover outweighs everything, then the first failure, then how it was stopped."""
        if self.leftovers:
            return ExitCode.CLEANUP_INCOMPLETE
        if self.first is not None:
            return self.first.exit_code
        if self.interrupted or not self.was_ready:
            return ExitCode.INTERRUPTED
        return ExitCode.OK


def memory_leftovers(
    before: Mapping[int, DeviceInfo],
    after: Mapping[int, DeviceInfo],
    own_pids: Collection[int],
    tolerance_bytes: int,
) -> tuple[str, ...]:
    """What of the deployment's device memory is not back, one text per device; empty when all of it is.

    A device of which a process of ours still holds memory is not back. Otherwise free memory decides, unless other
    processes came, went or changed meanwhile: then the difference is theirs. ``tolerance_bytes`` may be missing:
    drivers keep small caches of their own.
    """
    texts = []
    for index, old in sorted(before.items()):
        new = after.get(index)
        if new is None:
            texts.append(f"device {index}: cannot be read any more")
            continue
        ours = [process for process in new.processes if process.pid in own_pids]
        missing = old.free_bytes - new.free_bytes
        if ours:
            pids = ", ".join(str(process.pid) for process in ours)
            texts.append(f"device {index}: still held by pid {pids}")
        elif missing > tolerance_bytes and set(old.processes) == set(new.processes):
            texts.append(f"device {index}: {format_size(missing)} less free than before the boot, held by nobody known")
    return tuple(texts)
