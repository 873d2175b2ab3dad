"""Sizes and durations, in and out."""

from __future__ import annotations

import pytest

from stagelaunch.core.units import GIB, MIB, format_duration, format_size, format_sizes, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 << 30),
        ("1.5 MiB", 3 << 19),
        ("0B", 0),
        ("79.18GiB", int(79.18 * 2**30)),
        ("17", 17),
        (17, 17),
        (" 2KiB ", 2048),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "20GB", "20 gib", "-1B", "GiB", "1GiB 2", True, -1, "1e3B", "0x10"])
def test_not_a_size(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"not a"):
        parse_size(text)


@pytest.mark.parametrize(("text", "seconds"), [("15s", 15), ("200ms", 0.2), ("1.5m", 90), ("2h", 7200)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["15", 15, 1.5, "", "s", "-1s", "1 day"])
def test_not_a_duration(text: str | float) -> None:
    with pytest.raises(ValueError, match=r"15s|no unit"):
        parse_duration(text)


def test_for_people() -> None:
    assert [format_size(size) for size in (0, 1023, 1024, 63_439_000_000, -3 << 20)] == [
        "0 B", "1023 B", "1.00 KiB", "59.08 GiB", "-3.00 MiB",
    ]  # fmt: skip
    assert [format_duration(s) for s in (0.4, 59.99, 125.2, 3600)] == ["0.40s", "59.99s", "2m05s", "60m00s"]


def test_sizes_read_together_share_the_unit_of_the_largest() -> None:
    assert format_sizes([59 * GIB, 412 * MIB, 0, -GIB]) == ["59.00 GiB", "0.40 GiB", "0", "-1.00 GiB"]
    assert format_sizes([412 * MIB, 5]) == ["412.00 MiB", "0.00 MiB"]
    assert format_sizes([7, 0]) == ["7 B", "0 B"]
    assert format_sizes([]) == []
