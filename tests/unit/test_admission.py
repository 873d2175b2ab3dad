import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagelaunch.core.admission import (
    DeviceDemand,
    DeviceVerdict,
    admission_check,
    admission_findings,
    claim_check,
    device_verdicts,
    free_check,
    free_verdicts,
)
from stagelaunch.core.claims import Claim, HeldClaim, Holder
from stagelaunch.core.units import GIB

CARDS = {0: 80 * GIB, 1: 80 * GIB}
THREE_STAGES = {0: ({0}, 0.9), 1: ({1}, 0.6), 2: ({1}, 0.35)}


def test_a_need_equal_to_the_total_fits():
    assert admission_check(THREE_STAGES, CARDS, 2 * GIB) == []


def test_one_byte_more_than_the_total_does_not():
    assert admission_check({0: ([0], 0.5), 1: ([0], 0.5)}, {0: 1000}, 0) == []
    (finding,) = admission_check({0: ([0], 0.5), 1: ([0], 0.501)}, {0: 1000}, 0)
    assert "short by 1 B" in finding


def test_the_reserve_counts_once_for_each_stage_on_the_device():
    assert admission_check(THREE_STAGES, CARDS, 4 * GIB) == [
        "device 1: needs 84.00 GiB (stage 1: 48.00 GiB, stage 2: 28.00 GiB, reserve 2 x 4.00 GiB), "
        "has 80.00 GiB, short by 4.00 GiB; lower a budget or the reserve"
    ]


def test_shares_are_cut_to_whole_bytes_one_stage_at_a_time():
    # int(0.35 * 10) + int(0.35 * 10) + int(0.45 * 10) = 10, although the shares sum to 1.15
    assert admission_check({0: ([0], 0.35), 1: ([0], 0.35), 2: ([0], 0.45)}, {0: 10}, 0) == []


def test_a_stage_over_several_devices_counts_on_each_by_its_own_total():
    findings = admission_check({0: ([0, 1, 1], 0.9)}, {0: 100, 1: 10}, 5)
    assert len(findings) == 1
    assert findings[0].startswith("device 1: needs 14 B (stage 0: 9 B, reserve 1 x 5 B), has 10 B")


def test_every_finding_in_one_go_in_device_order_with_unknown_devices_among_them():
    stages = {2: ([11, 3], 1.0), 1: ([3, 7], 1.0), 0: ([11], 1.0)}
    findings = admission_check(stages, {11: 10, 3: 10, 5: 10}, 1)
    assert [finding.split(":")[0] for finding in findings] == ["device 3", "device 7", "device 11"]
    assert (
        findings[1] == "device 7: asked for by stage 1, but there is no such device; name one that is there (3, 5, 11)"
    )
    assert "stage 0" in findings[2]
    assert "stage 2" in findings[2]


def test_devices_without_stages_and_stages_without_devices_give_nothing():
    assert admission_check({0: ((), 0.5)}, CARDS, 2 * GIB) == []
    assert admission_check({}, {}, 0) == []


def test_a_utilization_of_one_is_all_of_the_device_not_one_byte():
    (finding,) = admission_check({0: ([0], 1)}, {0: 100}, 1)
    assert "needs 101 B" in finding


def test_verdicts_take_absolute_budgets_and_list_unused_devices():
    verdicts = device_verdicts({0: ([0], 0.5), 1: ([0, 9], 30)}, {0: 100, 1: 100}, 10)
    assert verdicts == (
        DeviceVerdict(0, 100, (DeviceDemand(0, 50), DeviceDemand(1, 30)), 10, 100, 0),
        DeviceVerdict(1, 100, (), 10, 0, 0),
        DeviceVerdict(9, None, (DeviceDemand(1, 30),), 10, None, None),
    )
    assert [verdict.fits for verdict in verdicts] == [True, True, False]


def test_the_budget_of_a_share_of_an_unknown_device_is_unknown_not_zero():
    (verdict,) = device_verdicts({0: ([4], 0.5)}, {}, 0)
    assert verdict.demands == (DeviceDemand(0, None),)


@pytest.mark.parametrize("budget", [-0.1, -1, math.nan, math.inf])
def test_a_budget_that_is_no_amount_is_refused(budget):
    with pytest.raises(ValueError, match="cannot plan stage 3"):
        device_verdicts({3: ([0], budget)}, {0: 100}, 0)


def test_a_negative_reserve_is_refused():
    with pytest.raises(ValueError, match="reserve"):
        admission_check({}, {}, -1)


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.tuples(st.lists(st.integers(0, 4), max_size=4), st.floats(0, 1) | st.integers(0, 10**12)),
        max_size=6,
    ),
    st.dictionaries(st.integers(0, 4), st.integers(0, 2**40), max_size=5),
    st.integers(0, 2**33),
)
def test_the_rule_as_the_issue_states_it(stages, totals, reserve):
    refused = set()
    for device in {device for devices, _ in stages.values() for device in devices} | set(totals):
        users = [budget for devices, budget in stages.values() if device in devices]
        if device not in totals:
            refused.add(device)
            continue
        bytes_of = [int(b * totals[device]) if isinstance(b, float) else b for b in users]
        if sum(b + reserve for b in bytes_of) > totals[device]:
            refused.add(device)
    verdicts = device_verdicts(stages, totals, reserve)
    assert {verdict.device for verdict in verdicts if not verdict.fits} == refused
    named = [int(text.split(":")[0].removeprefix("device ")) for text in admission_findings(verdicts).values()]
    assert named == sorted(refused)


# Against what is free now.

ONE = device_verdicts({0: ([0], 60), 1: ([1], 60)}, {0: 100, 1: 100, 2: 100}, 5)


def now(free, holders=(), claims=()):
    """Device 0 with this much free; device 1 is free."""
    verdict, _ = free_verdicts(ONE, {0: free, 1: 100}, {0: holders}, {0: claims})
    return verdict


def claim(pid: int, claimed: int, *members: int, hidden: bool = False, foreign: int = 0) -> Claim:
    return Claim(f"id-{pid}", "talk", pid, claimed, foreign, frozenset(members), hidden)


def test_a_need_equal_to_what_is_free_fits():
    assert free_check([now(65)]) == claim_check([now(65)]) == []


def test_too_little_free_names_who_holds_it():
    holders = [Holder(4711, 30, name="python"), Holder(12, None)]
    assert free_check([now(64, holders)]) == [
        "device 0: needs 65 B (stage 0: 60 B, reserve 1 x 5 B), but 64 B is free now (in use: pid 4711 python "
        "holds 30 B, pid 12 holds an unknown amount), short by 1 B; "
        "stop who holds it, or lower a budget or the reserve"
    ]
    assert claim_check([now(64, holders)]) == []


def test_what_is_claimed_has_a_finding_of_its_own():
    found = now(90, [Holder(5, 10)], [claim(9, 36, 5)])
    assert free_check([found]) == []
    assert claim_check([found]) == [
        "device 0: needs 65 B (stage 0: 60 B, reserve 1 x 5 B), but of the 90 B free now 26 B is claimed by running "
        "deployments (deployment talk (supervisor pid 9) claims 36 B and holds 10 B), short by 1 B in all; "
        "stop one, or lower a budget or the reserve"
    ]
    assert claim_check([now(90, [Holder(5, 10)], [claim(9, 35, 5)])]) == []


def test_what_members_hold_is_shown_as_their_deployment():
    found = now(60, [Holder(5, 10), Holder(6, 20), Holder(7, 10, "ours")], [claim(9, 35, 5, 6)])
    assert (found.holders, found.claims) == ((Holder(7, 10, "ours"),), (HeldClaim(claim(9, 35, 5, 6), 30),))
    (claimed,) = (*free_check([found]), *claim_check([found]))
    assert "of the 60 B free now (in use: pid 7 ours holds 10 B) 5 B is claimed" in claimed
    assert "claims 35 B and holds 30 B), short by 10 B" in claimed
    # All that was claimed is held.
    (free,) = free_check([now(60, [Holder(5, 15), Holder(6, 20), Holder(7, 10, "ours")], [claim(9, 35, 5, 6)])])
    assert "(in use: pid 7 ours holds 10 B, deployment talk (supervisor pid 9) holds 35 B), short by" in free


@pytest.mark.parametrize(
    ("free", "holders", "claims", "available"),
    [
        # Known members: what they do not hold yet is pending, whatever others do.
        (100, [], [claim(1, 40)], 60),
        (70, [Holder(5, 30)], [claim(1, 40, 5)], 60),
        (50, [Holder(5, 50)], [claim(1, 40, 5)], 50),
        (30, [Holder(5, 30), Holder(6, 40)], [claim(1, 40, 5)], 20),
        (10, [], [claim(1, 40)], 0),
        # Workers under pids that nobody attributes: the claim counts in full beside them.
        (70, [Holder(5, 30)], [claim(1, 40)], 30),
        (70, [Holder(5, None)], [claim(1, 40)], 30),
        (70, [], [claim(1, 40)], 30),
        # A pid that two claims call theirs is neither's.
        (70, [Holder(5, 30)], [claim(1, 40, 5), claim(2, 30, 5)], 0),
        # The driver is known to hide: what nobody holds is the claim's, but for what was there before it.
        (70, [Holder(5, None)], [claim(1, 40, 5)], 60),
        (70, [Holder(5, 0)], [claim(1, 40, 5)], 60),
        (70, [], [claim(1, 40, hidden=True)], 60),
        (60, [], [claim(1, 40, hidden=True, foreign=10)], 50),
        (50, [], [claim(1, 40, hidden=True)], 50),
        (40, [Holder(2, 30)], [claim(1, 40, hidden=True)], 30),
        # A stranger of unknown size may hold it as well.
        (50, [Holder(2, None)], [claim(1, 40, hidden=True)], 10),
        # Of a claim that has said nothing yet nothing is taken as held, not even beside one that the driver hides.
        (80, [], [claim(1, 30, hidden=True), claim(2, 40)], 30),
    ],
)  # fmt: skip
def test_what_others_claimed_and_do_not_hold_yet_is_not_available(free, holders, claims, available):
    assert now(free, holders, claims).available_bytes == available


def test_a_device_whose_free_memory_is_not_known_is_not_taken_as_free():
    with pytest.raises(KeyError):
        free_verdicts(ONE, {0: 100}, {}, {})
