"""The KV size is the truth, whoever else is booting: random interleavings of three stages in real processes.

A short, seeded slice by default; with STAGELAUNCH_SOAK=1 a thousand interleavings of each campaign, as
``scripts/soak interleavings`` runs them. A failure names the seed that shows it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import interleaving
import pytest
from interleaving import CAMPAIGNS, STAGES, Bench, Campaign, run_many

from stagelaunch.core.phases import BOOT_PHASES, LockMode, lock_of

SOAK = os.environ.get("STAGELAUNCH_SOAK") == "1"
ROUNDS = 1000 if SOAK else 5
DRIVERS = ("telling", "silent", "sizeless", "renumbered")
LOCKED = tuple(phase for phase in BOOT_PHASES if lock_of(phase) is not LockMode.NONE)
BOUND = 40
"""Within so many interleavings a broken product is found out."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600 if SOAK else 120)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with interleaving.bench(tmp_path_factory.mktemp("bench")) as made:
        yield made


@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=str)
def test_every_interleaving_gives_each_stage_what_it_has_alone(bench: Bench, campaign: Campaign) -> None:
    tally = run_many(bench, campaign, ROUNDS, seed=0)
    print(tally)
    assert tally.failed == [], tally.explain()
    # Over all boots of a stage there is one number, and no way out by refusing everything.
    assert {len(found) for found in tally.blocks.values()} == {1}
    assert tally.refused < len(STAGES) * ROUNDS
    assert len(tally.schedules) == ROUNDS
    if SOAK and campaign.neighbours in ("any", "mortal"):
        assert tally.edges - tally.acted_at <= {"gone", "dying", "ready", "is killed"}
    if SOAK and campaign.may_refuse and campaign.driver != "renumbered":
        assert tally.refused > 0


def test_what_the_driver_tells_changes_nothing_either(bench: Bench) -> None:
    for stage_id in range(len(STAGES)):
        found = {driver: bench.alone(Campaign(driver), stage_id) for driver in DRIVERS}
        assert all(figures["sizes"] == found["telling"]["sizes"] for figures in found.values())
        assert len({figures["sources"]["context"] for figures in found.values()}) == len({*DRIVERS} - {"sizeless"})


def test_a_seed_is_an_interleaving(bench: Bench) -> None:
    campaign = Campaign("telling", "any")
    first, again, other = (bench.run(campaign, seed) for seed in (11, 11, 12))
    assert (again.trace, again.figures) == (first.trace, first.figures)
    assert other.trace != first.trace
    assert {"profile: lock awaited", "capture: shared lock taken"} <= {edge for _, edge in first.trace + other.trace}


@pytest.mark.parametrize("driver", ["silent", "sizeless", "renumbered"])
def test_without_the_lock_it_would_be_found_out(bench: Bench, driver: str) -> None:
    assert run_many(bench, Campaign(driver, unlocked=LOCKED), BOUND, seed=0, stop_at_fault=True).failed


@pytest.mark.parametrize("phase", LOCKED)
def test_a_lock_that_is_missing_in_one_phase_would_be_found_out(bench: Bench, phase: str) -> None:
    assert run_many(bench, Campaign("silent", unlocked=(phase,)), BOUND, seed=0, stop_at_fault=True).failed


def test_sizing_by_what_is_used_on_the_whole_device_would_be_found_out(bench: Bench) -> None:
    campaign = Campaign("telling", sizing="device-wide")
    assert any("has blocks" in fault for seed in range(BOUND) for fault in bench.run(campaign, seed).faults)
