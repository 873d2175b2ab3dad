"""What other deployments were admitted with on a device, and how much of it still looks free.

Pure arithmetic over what was read: `system.claims` writes and reads the records, `core.admission` decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a device now, as the driver lists it."""

    pid: int
    held_bytes: int | None
    """What the driver says the process holds; None where it does not say."""
    name: str = ""


@dataclass(frozen=True)
class Claim:
    """What a deployment was admitted with on one device: budgets and reserves. It counts while its supervisor lives."""

    claim_id: str
    deployment: str
    pid: int
    """Of the supervisor, as it sees itself."""
    claimed_bytes: int
    unattributed_bytes: int = 0
    """In use at its admission by no process that the driver told the size of: at most this much is not a claim's."""
    member_pids: frozenset[int] = frozenset()
    """The workers that have said who they are, by the pid the driver knows them under."""
    has_hidden_members: bool = False
    """A worker has said that the driver does not tell what it holds."""


@dataclass(frozen=True)
class HeldClaim:
    """A claim and how much of it is in use."""

    claim: Claim
    held_bytes: int | None
    """What the driver says its members hold; None where it does not say, or no member is known yet."""


def held_claims(claims: Sequence[Claim], holders: Collection[Holder]) -> tuple[HeldClaim, ...]:
    """The claims, largest first, with what the driver says of their members."""
    told = _told_bytes(claims, holders)
    held = [HeldClaim(claim, told[number] or None) for number, claim in enumerate(claims)]
    return tuple(sorted(held, key=lambda item: (-item.claim.claimed_bytes, item.claim.deployment, item.claim.pid)))


def foreign_holders(claims: Sequence[Claim], holders: Collection[Holder]) -> tuple[Holder, ...]:
    """The processes that are not known to belong to a claim."""
    owners = _owners(claims)
    return tuple(holder for holder in holders if holder.pid not in owners)


def pending_bytes(used_bytes: int, holders: Collection[Holder], claims: Sequence[Claim]) -> int:
    """What is claimed and not held yet, so that it still looks free. Never less, often more.

    What nobody knows to be a claim's own counts as another's: the claim then stands in full beside it. Only of
    claimants that have said that the driver hides their bytes are the bytes that it attributes to nobody taken to be
    theirs, less what was such before any of the claims. Otherwise beside them nothing would ever be admitted.
    """
    told = _told_bytes(claims, holders)
    rest = [max(0, claim.claimed_bytes - told_bytes) for claim, told_bytes in zip(claims, told)]
    hidden_bytes = sum(rest_bytes for claim, rest_bytes in zip(claims, rest) if _is_hidden(claim, holders))
    theirs_bytes = 0
    # A process that is no member and of unknown size may hold all of it.
    if hidden_bytes and all(holder.held_bytes for holder in foreign_holders(claims, holders)):
        theirs_bytes = max(0, _nobodys_bytes(used_bytes, holders) - min(claim.unattributed_bytes for claim in claims))
    return sum(rest) - min(hidden_bytes, theirs_bytes)


def unattributed_bytes(used_bytes: int, holders: Collection[Holder], claims: Sequence[Claim]) -> int:
    """What is in use and certainly no claim's to be made now; for the record of that claim."""
    earlier = [claim.unattributed_bytes for claim in claims]
    return min([_nobodys_bytes(used_bytes, holders), *earlier])


def _nobodys_bytes(used_bytes: int, holders: Collection[Holder]) -> int:
    return max(0, used_bytes - sum(holder.held_bytes or 0 for holder in holders))


def _is_hidden(claim: Claim, holders: Collection[Holder]) -> bool:
    # A listed process has a context: 0 bytes means that the driver does not know.
    silent = {holder.pid for holder in holders if not holder.held_bytes}
    return claim.has_hidden_members or bool(claim.member_pids & silent)


def _told_bytes(claims: Sequence[Claim], holders: Collection[Holder]) -> list[int]:
    """What the driver says the members of each claim hold, as far as it says it."""
    owners = _owners(claims)
    told = [0] * len(claims)
    for holder in holders:
        if holder.pid in owners:
            told[owners[holder.pid]] += holder.held_bytes or 0
    return told


def _owners(claims: Sequence[Claim]) -> dict[int, int]:
    """Number of the claim by member pid. A pid that two claims call theirs is neither's: counted twice it would hide
    one."""
    times = Counter(pid for claim in claims for pid in claim.member_pids)
    return {pid: number for number, claim in enumerate(claims) for pid in claim.member_pids if times[pid] == 1}
