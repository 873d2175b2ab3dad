"""Deployments admitted one after another on one device, with anything going on there: never more than there is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from stagelaunch.core.admission import device_verdicts, free_verdicts
from stagelaunch.core.claims import Claim, Holder, unattributed_bytes

TOTAL = 1000


@dataclass(frozen=True)
class Deployment:
    """One that was admitted: its claim, what its one worker holds, and how much of that can be known."""

    claim: Claim
    held: int
    listing: str
    """``sized``, ``unsized``: in the driver's table with or without its bytes; ``hidden``: not there."""


@dataclass(frozen=True)
class Foreign:
    """Memory of others, told by the driver or not."""

    told: int
    untold: int
    unsized: int

    @property
    def total(self) -> int:
        return self.told + self.untold + self.unsized

    def holders(self) -> list[Holder]:
        told = [Holder(1, self.told)] if self.told else []
        return told + ([Holder(2, None)] if self.unsized else [])


def listed(deployments: list[Deployment], foreign: Foreign) -> list[Holder]:
    found = foreign.holders()
    for deployment in deployments:
        if deployment.held and deployment.listing != "hidden":
            found.append(Holder(deployment.claim.pid, deployment.held if deployment.listing == "sized" else None))
    return found


def ask(need: int, deployments: list[Deployment], foreign: Foreign, pid: int) -> Claim | None:
    """Admission as the supervisor does it."""
    used = min(TOTAL, foreign.total + sum(deployment.held for deployment in deployments))
    claims = [deployment.claim for deployment in deployments]
    holders = listed(deployments, foreign)
    (free,) = free_verdicts(
        device_verdicts({0: ([0], need)}, {0: TOTAL}, 0), {0: TOTAL - used}, {0: holders}, {0: claims}
    )
    if free.shortfall_bytes:
        return None
    return Claim(f"id-{pid}", "d", pid, need, unattributed_bytes(used, holders, claims))


def publish(deployment: Deployment, what: str) -> Deployment:
    """The worker says who it is: truthfully, or nothing."""
    claim = deployment.claim
    if what == "pid" and deployment.listing != "hidden":
        claim = replace(claim, member_pids=frozenset({claim.pid}))
    elif what == "unknown" and deployment.listing != "sized":
        claim = replace(claim, has_hidden_members=True)
    return replace(deployment, claim=claim)


@st.composite
def runs(draw: st.DrawFn, foreign_changes: bool) -> None:
    small = st.integers(0, 150)
    foreigns = st.builds(Foreign, small, small, st.sampled_from([0, 0, 0, 50]))
    foreign = draw(foreigns)
    deployments: list[Deployment] = []
    for number in range(draw(st.integers(1, 7))):
        # Whatever happened since the last: memory taken and given back, workers that tell, deployments that end.
        deployments = [
            publish(replace(old, held=draw(st.integers(0, old.claim.claimed_bytes))), draw(st.sampled_from(SAYS)))
            for old in deployments
            if draw(st.integers(0, 5))
        ]
        if foreign_changes:
            foreign = draw(foreigns)
        claim = ask(draw(st.integers(0, TOTAL)), deployments, foreign, 100 + number)
        if claim is not None:
            deployments.append(Deployment(claim, 0, draw(st.sampled_from(["sized", "unsized", "hidden"]))))
        claimed = sum(deployment.claim.claimed_bytes for deployment in deployments)
        assert claimed <= TOTAL
        if not foreign_changes:
            assert claimed + foreign.total <= TOTAL


SAYS = ["pid", "unknown", "nothing"]


@given(st.data())
def test_claims_never_exceed_the_device_whatever_others_do(data: st.DataObject) -> None:
    data.draw(runs(foreign_changes=True))


@given(st.data())
def test_claims_and_what_others_hold_all_the_while_never_exceed_the_device(data: st.DataObject) -> None:
    data.draw(runs(foreign_changes=False))


def test_a_driver_that_hides_everything_does_not_keep_the_second_deployment_out() -> None:
    foreign = Foreign(0, 100, 0)
    first = ask(400, [], foreign, 100)
    assert first is not None
    running = Deployment(first, 400, "hidden")
    assert ask(500, [running], foreign, 101) is None
    assert ask(500, [publish(running, "unknown")], foreign, 101) is not None
    assert ask(501, [publish(running, "unknown")], foreign, 101) is None


def test_what_an_earlier_deployment_held_is_not_taken_for_foreign_once_it_is_gone() -> None:
    foreign = Foreign(0, 100, 0)
    first = ask(400, [], foreign, 100)
    assert first is not None
    second = ask(400, [publish(Deployment(first, 400, "hidden"), "unknown")], foreign, 101)
    assert second is not None
    alone = publish(Deployment(second, 400, "hidden"), "unknown")
    assert ask(500, [alone], foreign, 102) is not None
