"""Claims of deployments on device memory, and the mutex under which they are made; files in the lock directory.

``UUID.claim.PID.STAMP``   written by a supervisor before its first spawn, for each device; its deployment's share
``UUID.member.PID.STAMP``  written by a worker: which claim the memory counts for that the driver lists under its pid
``admission.lock``         held from reading what is free to having written the claims

Like the records of lock holders they are believed while their writer lives. Not the arithmetic (`core.claims`). Used by
the supervisor (claims), the worker (its membership) and ``plan`` (reading).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stagelaunch.core.claims import Claim
from stagelaunch.core.config_fields import is_slug
from stagelaunch.core.errors import LockTimeoutError
from stagelaunch.core.phases import LockMode
from stagelaunch.core.units import format_duration
from stagelaunch.system.locks import LockDirectory, holders
from stagelaunch.system.process import Identity
from stagelaunch.system.records import (
    PAUSE_FIRST_S,
    PAUSE_GROWTH,
    PAUSE_MAX_S,
    Found,
    LockFile,
    Record,
    boottime_s,
    checked_uuid,
    find_records,
)

_MUTEX = "admission"
_LIMITS = {"pid": 2**31}
"""Above these nothing is what it says; others are amounts of anything."""


@dataclass(frozen=True)
class Share:
    """What a deployment claims of one device."""

    claimed_bytes: int
    unattributed_bytes: int
    """See ``core.claims.Claim``."""


def new_claim_id() -> str:
    """A name for the claims of one run of a deployment that no other run has."""
    return secrets.token_hex(8)


@contextmanager
def hold_claims(
    directory: LockDirectory,
    claim_id: str,
    deployment: str,
    shares: Mapping[str, Share],
    machine: str = "",
    runtime: str = "",
) -> Iterator[None]:
    """Claim a share of each device, by UUID, for the body. All of them or none.

    ``machine`` names the simulated one the devices are of, "" for the real one: simulated UUIDs are alike on all.
    ``runtime`` names the runtime directory of the supervisor, for ``claiming_pid``.
    LockDirectoryError where that cannot be written down. To be entered under ``admission_mutex``.
    """
    with ExitStack() as claims:
        for uuid, share in sorted(shares.items()):
            fields = {"claim_id": claim_id, "deployment": deployment, "machine": machine, "runtime": runtime}
            fields |= {**asdict(share), **asdict(Identity.of_self())}
            record = Record(directory.path, checked_uuid(uuid), "claim", fields)
            claims.callback(record.close)
            record.publish()
        yield


def publish_member(directory: os.PathLike[str], device_uuid: str, claim_id: str, driver_pid: int | None) -> Record:
    """Say that this process belongs to a claim and under which pid the driver knows it; ``close`` the answer to end it.

    None for ``driver_pid`` says that the driver does not tell what this process holds. Until a worker has said either,
    others count its claim in full beside what it holds. LockDirectoryError where it cannot be written down.
    """
    fields = {"claim_id": claim_id, "driver_pid": driver_pid, **asdict(Identity.of_self())}
    record = Record(Path(directory), checked_uuid(device_uuid), "member", fields)
    with ExitStack() as unfinished:
        unfinished.callback(record.close)
        record.publish()
        unfinished.pop_all()
    return record


def read_claims(directory: os.PathLike[str], device_uuid: str, machine: str = "") -> tuple[Claim, ...]:
    """What living deployments have claimed of a device of ``machine``, in no order; nothing without a directory.

    Creates nothing. Records of the dead are removed; what is no record is not believed. LockDirectoryError where the
    directory cannot be read.
    """
    path, uuid = Path(directory), checked_uuid(device_uuid)
    members = [found for found in find_records(path, uuid, "member") if _is_alive(found)]
    found_here = [found for found in find_records(path, uuid, "claim") if found.fields.get("machine", "") == machine]
    claims = [_claim(found, members) for found in found_here if _is_alive(found)]
    return tuple(claim for claim in claims if claim is not None)


def claiming_pid(directory: os.PathLike[str], deployment: str, runtime: str) -> int | None:
    """The living supervisor of this user that has a claim, on any device, for a deployment of this runtime directory.

    LockDirectoryError where the directory cannot be read; None where there is none.
    """
    path = Path(directory)
    names = os.listdir(path) if path.is_dir() else []
    for uuid in {name.partition(".claim.")[0] for name in names if ".claim." in name}:
        for found in find_records(path, uuid, "claim"):
            said = found.fields.get("deployment"), found.fields.get("runtime")
            # A record of a stranger must not keep this user from starting.
            ours = found.user_id in (0, os.getuid())
            if ours and said == (deployment, runtime) and _is_alive(found):
                return _identity(found.fields).pid
    return None


@asynccontextmanager
async def admission_mutex(directory: LockDirectory, owner: str, timeout_s: float) -> AsyncIterator[None]:
    """Be the only one on this machine that decides about admission, for the body.

    LockTimeoutError after ``timeout_s``, naming who holds it; nothing is left held.
    """
    with ExitStack() as held:
        lock = LockFile(directory.path / f"{_MUTEX}.lock")
        held.callback(lock.release)
        await _take(lock, directory, owner, timeout_s)
        # Whatever record is left can only be of the dead: look, and with that remove them.
        holders(directory, _MUTEX)
        record = Record(directory.path, _MUTEX, "holder", _mutex_fields(owner))
        held.callback(record.close)
        record.publish()
        yield


async def _take(lock: LockFile, directory: LockDirectory, owner: str, timeout_s: float) -> None:
    deadline_s, pause_s = time.monotonic() + timeout_s, PAUSE_FIRST_S
    while not lock.attempt(fcntl.LOCK_EX):
        if time.monotonic() >= deadline_s:
            named = "; ".join(map(str, holders(directory, _MUTEX))) or "a process that left no record"
            raise LockTimeoutError(
                f"cannot admit deployment {owner} within {format_duration(timeout_s)}: {directory.path / _MUTEX}.lock"
                f" is held by {named}; wait for it, stop it, or raise the lock timeout"
            )
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * PAUSE_GROWTH, PAUSE_MAX_S)


def _mutex_fields(owner: str) -> dict[str, Any]:
    fields = {"device_uuid": _MUTEX, "pid": os.getpid(), "owner": owner, "phase": "admission"}
    return {**fields, "mode": LockMode.EXCLUSIVE, "since_s": boottime_s()}


def _is_alive(found: Found) -> bool:
    """Whether the writer lives, although something keeps the record locked: a forked child can outlive it."""
    try:
        identity = _identity(found.fields)
    except (KeyError, ValueError):
        return False
    if not identity.is_surely_dead():
        return True
    with suppress(OSError):
        found.path.unlink()
    return False


def _identity(fields: Mapping[str, Any]) -> Identity:
    numbers = {key: _number(fields, key) for key in ("pid", "start", "pid_namespace")}
    return Identity(**numbers, boot=str(fields["boot"]))


def _claim(found: Found, members: list[Found]) -> Claim | None:
    fields = found.fields
    try:
        claim_id, deployment = fields["claim_id"], fields["deployment"]
        if not isinstance(claim_id, str) or not isinstance(deployment, str) or not is_slug(deployment):
            return None
        # A stranger's member would make the claim look held.
        ours = [member.fields for member in members if _belongs(member, claim_id, found.user_id)]
        pids = [member.get("driver_pid") for member in ours]
        return Claim(
            claim_id=claim_id,
            deployment=deployment,
            pid=_number(fields, "pid"),
            claimed_bytes=_number(fields, "claimed_bytes"),
            unattributed_bytes=_number(fields, "unattributed_bytes"),
            member_pids=frozenset(pid for pid in pids if isinstance(pid, int)),
            has_hidden_members=None in pids,
        )
    except (KeyError, ValueError):
        return None


def _belongs(member: Found, claim_id: str, user_id: int) -> bool:
    return member.fields.get("claim_id") == claim_id and member.user_id == user_id


def _number(fields: Mapping[str, Any], key: str) -> int:
    value = fields[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LIMITS.get(key, 2**63):
        raise ValueError(f"{key} is no amount")
    return value
