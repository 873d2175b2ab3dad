"""What `import stagelaunch` gives, and what it does not drag in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from stagelaunch.core.phases import STEPS

README = (Path(__file__).parents[2] / "README.md").read_text()


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_library_or_the_command_imports_no_heavy_module() -> None:
    modules = "stagelaunch, stagelaunch.cli.main, stagelaunch.cli.up, stagelaunch.cli.plan, stagelaunch.cli.doctor"
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'pynvml') if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_the_example_in_the_readme_runs_and_says_what_it_says() -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    lines = run_python(example).splitlines()
    assert lines[0] == "[[0], [1, 2]]"
    assert "device 1" in lines[1]


def test_the_phase_table_of_the_readme_is_the_one_in_the_code() -> None:
    phases = README.partition("| phase | what happens")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([a-z, ]+) \|[^|]*\| ([a-z, ]+) \|$", f"| phase | what happens{phases}", re.MULTILINE)
    said = {phase: set(locks.split(", ")) for phases, locks in rows for phase in phases.split(", ")}
    assert said.pop("phase") == {"device lock"}
    wanted: dict[str, set[str]] = {}
    for step in STEPS:
        wanted.setdefault(step.phase, set()).add(step.lock)
    assert said == wanted
