"""The script that measures on a real card: it skips without one, and its steps hold on a simulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"


def run(*arguments: object, timeout_s: float = 480.0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)


def test_without_a_card_it_says_so_and_ends_well(tmp_path: Path) -> None:
    # A library of that name that is none: found before any real one.
    (tmp_path / "libnvidia-ml.so.1").write_text("")
    done = run(LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: cannot ask the NVIDIA driver for devices: ")


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param(
            "simulated",
            marks=[
                pytest.mark.soak,
                pytest.mark.skipif(not os.environ.get("STAGELAUNCH_SOAK"), reason="minutes: set STAGELAUNCH_SOAK=1"),
            ],
        ),
    ],
)
def test_its_checks_hold(tmp_path: Path, backend: str) -> None:
    done = run("--backend", backend, "--json", tmp_path / "found.json")
    if done.stdout.startswith("skipped: "):
        pytest.skip("no CUDA device")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == []
    assert "all checks hold" in done.stdout
