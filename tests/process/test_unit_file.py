"""The systemd unit, as systemd itself reads it. Needs its analyser only; no service manager runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployments import Site, light_stage

from stagelaunch.core.config import Timeouts
from stagelaunch.core.unit_file import Service, command_line, unit_name, unit_text

ODD = "a b  100% $HOME ${x} \"q\" 's' back\\slash %i"
analyser = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


def verify(directory: Path, text: str) -> tuple[int, str]:
    unit = directory / unit_name("site")
    unit.write_text(text)
    command = ["systemd-analyze", "--man=no", "--recursive-errors=no", "verify", str(unit)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ran.returncode, ran.stderr


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / ODD).mkdir()
    return Site(tmp_path / ODD, [light_stage(0, "alpha", 0)])


@analyser
@pytest.mark.parametrize("options", [[], ["--user", "daemon"]])
def test_the_unit_passes_and_an_unknown_key_or_a_wrong_path_does_not(site: Site, options: list[str]) -> None:
    site.top["runtime_dir"] = None
    ran = site.run("systemd", str(site.write()), *options)
    assert ran.code == 0, ran.stderr
    assert verify(site.directory.parent, ran.stdout) == (0, "")
    for damage in (("WatchdogSec=", "WatchdogSek="), (sys.executable, "/no/such/program")):
        assert damage[0] in ran.stdout
        code, said = verify(site.directory.parent, ran.stdout.replace(*damage))
        assert (code, bool(said)) == (1, True)
    said = ran.stdout.splitlines()
    assert ("User=daemon" in said) == (options != [])
    assert f"RuntimeDirectory=stagelaunch{'-daemon' if options else ''}" in said
    assert "RestartPreventExitStatus=64 78" in said


@analyser
def test_odd_paths_reach_the_program(tmp_path: Path) -> None:
    directory = tmp_path / "a b  100% $HOME ${x} %i"
    directory.mkdir()
    program = directory / "python"
    program.symlink_to(sys.executable)
    service = Service("site", (str(program), "up", ODD), Timeouts())
    # The analyser looks for the program: it has understood its path.
    assert verify(tmp_path, unit_text(service)) == (0, "")
    program.unlink()
    assert verify(tmp_path, unit_text(service))[0] == 1


def test_arguments_are_quoted_as_systemd_reads_them(site: Site) -> None:
    assert command_line(("/py", "up", "/plain/path.yaml")) == "/py up /plain/path.yaml"
    assert command_line(("/py", "a b", "100%", 'q"\\', "")) == r'/py "a b" 100%% "q\"\\" ""'
    # No variable is expanded anywhere in a command that begins with a colon.
    assert command_line(("/py", "$HOME")) == ':/py "$HOME"'
    assert command_line(("/p y", "$")) == '":/p y" "$"'
    assert command_line(("/py", "a\nb\u2028")) == r'/py "a\x0ab\xe2\x80\xa8"'
    for words, cause in ((("/py", "\udcff"), "not UTF-8"), (("/p'y",), "runs no program with quotes")):
        with pytest.raises(ValueError, match=cause):
            command_line(words)


def test_the_command_refuses_what_cannot_work(site: Site) -> None:
    config = str(site.write())
    assert site.run("systemd", config, "--unit-name").stdout == "stagelaunch-site.service\n"
    refused = site.run("systemd", config, "--user", "no\nbody")
    assert (refused.code, "no name of a user" in refused.stderr) == (64, True)
    site.stages[0]["devices"] = []
    refused = site.run("systemd", str(site.write()))
    assert (refused.code, "stages[0].devices" in refused.stderr) == (78, True)
    assert refused.stdout == ""


def test_the_unit_leaves_room_for_our_own_deadlines() -> None:
    limits = Timeouts(phase="100s", lock="20s", stage="600s", stop="40s", memory="5s", driver="6s")
    said = unit_text(Service("site", ("/py",), limits)).splitlines()
    assert "TimeoutStartSec=110s" in said
    assert "TimeoutStopSec=73s" in said
