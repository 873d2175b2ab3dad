"""Where a process's cgroup v2 directory is, and what no cgroup means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagelaunch.system import cgroup

LINE = "41 31 0:38 {root} {place} rw,relatime shared:1 - {kind} x rw"


@pytest.mark.parametrize(
    ("root", "place", "kind", "own", "found"),
    [
        ("/", "/sys/fs/cgroup", "cgroup2", "0::/system.slice/x.service", "/sys/fs/cgroup/system.slice/x.service"),
        ("/", "/sys/fs/cgroup/unified", "cgroup2", "9:pids:/a\n0::/", "/sys/fs/cgroup/unified"),
        ("/docker/1", "/sys/fs/cgroup", "cgroup2", "0::/docker/1/a", "/sys/fs/cgroup/a"),
        ("/docker/1", "/sys/fs/cgroup", "cgroup2", "0::/docker/2", None),
        ("/", "/a\\040place", "cgroup2", "0::/b", "/a place/b"),
        ("/", "/sys/fs/cgroup/pids", "cgroup", "0::/", None),
        ("/", "/sys/fs/cgroup", "cgroup2", "9:pids:/a", None),
    ],
)
def test_the_directory_is_found_where_it_is_mounted(
    root: str, place: str, kind: str, own: str, found: str | None
) -> None:
    mounts = "1 1 8:1 / / rw - ext4 /dev/x rw\n" + LINE.format(root=root, place=place, kind=kind)
    assert cgroup.locate(mounts, own) == (None if found is None else Path(found))


def test_where_there_is_none_every_call_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "own_directory", lambda: None)
    assert cgroup.create("x") is None
    # A plain directory is no cgroup: nothing may come to be in it, and nothing stays.
    assert not cgroup.enter(tmp_path / "stage", os.getpid())
    assert (cgroup.pids(tmp_path), list(tmp_path.iterdir())) == ((), [])
    cgroup.kill(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not cgroup.is_of(tmp_path, tmp_path.name)
    assert cgroup.remove(tmp_path / "gone")
