"""What this process holds on its device: by the driver's own figure where it can be found and verified, else by deltas.

The ladder: our pid in the driver's process table; our pid outside the container; the one pid that appeared while our
context was created. A rung is believed when its figure rises with an allocation of known size. Below the last rung
there is no figure, never 0: then only changes of the device's free memory count, inside a window that nobody may
disturb. Called by ``worker.boot`` under the exclusive device lock; the rules are in ``core.attribution``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagelaunch.core.attribution import (
    VERIFY_BYTES,
    Identity,
    ProcessTable,
    Surroundings,
    candidates,
    confirms,
    disturbance,
)
from stagelaunch.core.errors import DisturbedError, StageError
from stagelaunch.core.ledger import Source, Term
from stagelaunch.devices.base import Device

_LOOKS = 5


class OwnMemory:
    """The account of one process on one device. ``create_context`` comes first, once."""

    def __init__(self, device: Device, own_pids: Sequence[int]) -> None:
        self._device = device
        self._own_pids = tuple(own_pids)
        self._context_bytes = 0
        self._window: Surroundings | None = None
        self.identity: Identity | None = None
        """Who we are to the driver; None before there is a context, and when it cannot be told."""

    def create_context(self) -> Term:
        """Create the context; what it costs. DisturbedError when that could not be told from what others did."""
        before = self._look()
        self._device.create_context()
        after = self._look()
        self._identify(before.table, after.table)
        fell_bytes = None if before.free_bytes is None or after.free_bytes is None else _fall(before, after)
        if self.identity is None:
            return self._context_by_delta(before, after, fell_bytes)
        own_bytes = _figure(after.table, self.identity) or 0
        self._context_bytes = own_bytes - self._device.memory().reserved_bytes
        return Term(self._context_bytes, self.identity.source, fell_bytes)

    def held_bytes(self) -> int | None:
        """The driver's figure for this process now; None when it gives none. Never 0 for unknown."""
        if self.identity is None:
            return None
        return _figure(self._device.process_table(), self.identity) or None

    def grown(self) -> Term | None:
        """What the process took besides its context and its allocator, by the driver's figure; None without one.

        Whoever else changes the device does not show in it.
        """
        held_bytes = self.held_bytes()
        if self.identity is None or held_bytes is None:
            return None
        grown_bytes = held_bytes - self._device.memory().reserved_bytes - self._context_bytes
        return Term(max(grown_bytes, 0), self.identity.source)

    def begin_window(self) -> None:
        """From here to ``non_torch`` nobody else may change the device. Needed only where there is no ``identity``."""
        self._window = self._look()

    def non_torch(self) -> Term:
        """What the process took besides its context and its allocator, and ends the window.

        By the driver's figure: since the context was created. Else by the fall of free memory inside the window;
        DisturbedError when somebody else changed the device meanwhile, or a driver that told the figure does so no
        more; StageError when free memory cannot be read.
        """
        if (grown := self.grown()) is not None:
            return grown
        before, after = self._window, self._look()
        if before is None:
            raise DisturbedError(
                "cannot measure what the libraries took during the profile: the driver told what this process holds "
                "when its context was created, and does not now; look at the driver"
            )
        self._window = None
        fell_bytes = None if before.free_bytes is None or after.free_bytes is None else _fall(before, after)
        if fell_bytes is None:
            raise _cannot_tell("what the libraries took during the profile")
        self._refuse_disturbance(before, after, "what the libraries took during the profile", newcomers=0)
        return Term(max(fell_bytes, 0), Source.FREE_DELTA)

    def _look(self) -> Surroundings:
        """Free memory between two equal tables: who has a share in it is in the table, and nobody else is."""
        table = self._device.process_table()
        for _ in range(_LOOKS):
            free_bytes, seen = self._free_bytes(), table
            table = self._device.process_table()
            if table == seen:
                return Surroundings(free_bytes, table)
        return Surroundings(free_bytes, table, steady=False)

    def _free_bytes(self) -> int | None:
        free_bytes = self._device.driver_free_bytes()
        return None if free_bytes is None else free_bytes + self._device.memory().reserved_bytes

    def _identify(self, before: ProcessTable | None, created: ProcessTable | None) -> None:
        """Go down the ladder; each rung must rise with an allocation."""
        reserved_bytes = self._device.memory().reserved_bytes
        ballast = self._device.empty((VERIFY_BYTES,), torch.uint8)
        grown_bytes = self._device.memory().reserved_bytes - reserved_bytes
        filled = self._device.process_table()
        for identity in candidates(self._own_pids, before, filled):
            if confirms(_figure(created, identity), _figure(filled, identity), grown_bytes):
                self.identity = identity
                break
        del ballast
        self._device.empty_cache()

    def _context_by_delta(self, before: Surroundings, after: Surroundings, fell_bytes: int | None) -> Term:
        if fell_bytes is None:
            raise _cannot_tell("what the device context takes")
        self._refuse_disturbance(before, after, "what the device context takes", newcomers=1)
        if fell_bytes <= 0:
            raise DisturbedError(
                "cannot measure what the device context takes: free memory did not fall while it was created, so "
                "another process gave some back; stop whoever changes the device while this stage boots"
            )
        if after.table is not None and before.table is not None:
            # Ourselves, in whatever way the driver lists us.
            self._own_pids += tuple(after.table.keys() - before.table.keys())
        return Term(fell_bytes, Source.FREE_DELTA)

    def _refuse_disturbance(self, before: Surroundings, after: Surroundings, what: str, *, newcomers: int) -> None:
        reason = disturbance(before, after, self._own_pids, newcomers=newcomers)
        if reason is not None:
            raise DisturbedError(
                f"cannot measure {what}: meanwhile {reason}, and the driver does not tell this process's memory from "
                f"that of others; stop whoever changes the device while this stage boots, or give the driver's process "
                f"accounting to this user or container"
            )


def _figure(table: ProcessTable | None, identity: Identity) -> int | None:
    """The figure of a process. A process that is not listed holds nothing yet; one without a size is unknown."""
    return None if table is None else table.get(identity.pid, 0)


def _fall(before: Surroundings, after: Surroundings) -> int:
    assert before.free_bytes is not None
    assert after.free_bytes is not None
    return before.free_bytes - after.free_bytes


def _cannot_tell(what: str) -> StageError:
    return StageError(
        f"cannot measure {what}: the driver gives neither this process's memory nor the device's free memory; "
        f"give the driver's process accounting to this user or container"
    )
