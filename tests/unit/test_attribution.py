"""Who we are in the driver's table, and who else moved."""

from __future__ import annotations

import pytest

from stagelaunch.core.attribution import SLACK_BYTES, Identity, Surroundings, candidates, confirms, disturbance
from stagelaunch.core.ledger import Source
from stagelaunch.core.units import MIB

OWN, HOST, NEW = (
    Identity(47, Source.OWN_PID),
    Identity(9047, Source.HOST_PID),
    Identity(8, Source.NEW_PID),
)


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({}, {47: 5}, (OWN,)),
        # Listed under our number, and under the one outside: both are tried, ours first.
        ({}, {47: 5, 9047: 5}, (OWN, HOST)),
        ({1: 9}, {1: 9, 8: 5}, (NEW,)),
        # Our number is a stranger's on the host; we are the one that came.
        ({47: 9}, {47: 9, 8: 5}, (OWN, NEW)),
        # Two came: neither can be called ours.
        ({}, {8: 5, 9: 5}, ()),
        # Listed with nothing, or without a figure: unknown, not 0.
        ({}, {47: 0}, ()),
        ({}, {47: None, 8: None}, ()),
        # Two new ones, one of them without a figure: still two.
        ({}, {8: 5, 9: None}, ()),
        (None, {47: 5, 8: 5}, (OWN,)),
        ({}, None, ()),
        ({}, {}, ()),
    ],
)
def test_candidates_in_the_order_of_the_ladder(before, after, found):
    assert candidates((47, 9047), before, after) == found


@pytest.mark.parametrize(
    ("before", "after", "believed"),
    [
        (10 * MIB, 74 * MIB, True),
        (0, 64 * MIB, True),
        (10 * MIB, 74 * MIB + SLACK_BYTES, True),
        (10 * MIB, 74 * MIB + SLACK_BYTES + 1, False),
        (10 * MIB, 74 * MIB - 1, False),
        (10 * MIB, 10 * MIB, False),
        (None, 74 * MIB, False),
        (10 * MIB, None, False),
    ],
)
def test_a_figure_is_ours_when_it_rises_with_us(before, after, believed):
    assert confirms(before, after, 64 * MIB) is believed


def look(free=None, table=None):
    return Surroundings(free, table)


@pytest.mark.parametrize(
    ("before", "after", "newcomers", "reason"),
    [
        (look(100, {1: 5}), look(90, {1: 5}), 0, None),
        (look(100, {1: 5}), look(90, {1: 5, 8: 10}), 1, None),
        (look(100, {1: 5}), look(90, {1: 5, 8: 10}), 0, "pid 8 appeared on the device"),
        (look(100, {1: 5}), look(90, {1: 5, 8: 10, 9: None}), 1, "pid 8, 9 appeared on the device"),
        # We are listed under our own number: the other one is not we.
        (look(100, {1: 5}), look(90, {1: 5, 47: None}), 1, None),
        (look(100, {1: 5}), look(90, {1: 5, 47: None, 8: None}), 1, "pid 8 appeared on the device"),
        # Our number was a stranger's before; we are the one that came.
        (look(100, {47: 5}), look(90, {47: 5, 8: None}), 1, None),
        (look(100, {1: 5, 2: None}), look(105, {1: 5}), 0, "pid 2 left the device"),
        (look(100, {1: 5}), look(99, {1: 6}), 0, "pid 1 went from 5 B to 6 B"),
        # Ourselves, under a figure nobody could confirm.
        (look(100, {47: 5}), look(99, {47: 6}), 0, None),
        (look(100, {1: None}), look(99, {1: 6}), 0, None),
        (look(0, None), look(SLACK_BYTES, None), 0, None),
        (look(0, None), look(SLACK_BYTES + MIB, None), 0, "free memory rose by 17.00 MiB"),
        (look(0, {}), look(SLACK_BYTES + MIB, None), 0, "free memory rose by 17.00 MiB"),
        (look(None, None), look(5, None), 0, None),
    ],
)
def test_what_others_did_meanwhile(before, after, newcomers, reason):
    assert disturbance(before, after, (47,), newcomers=newcomers) == reason


def test_a_look_that_was_never_steady_is_a_disturbance():
    steady, unsteady = look(100, {1: None}), Surroundings(100, {1: None}, steady=False)
    for before, after in ((steady, unsteady), (unsteady, steady)):
        assert disturbance(before, after, (47,)) == "processes on the device changed each time it was looked at"
