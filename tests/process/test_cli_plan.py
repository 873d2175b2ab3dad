"""The command line as users run it: real processes, their exit codes, what they print where, what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from stagelaunch.cli.main import main
from stagelaunch.core.errors import ExitCode, LockTimeoutError
from stagelaunch.core.units import GIB, MIB

ROOT = Path(__file__).parents[2]
H100 = ROOT / "configs" / "qwen3-omni-2xh100.yaml"
TINY = ROOT / "configs" / "qwen3-omni-tiny.yaml"
ON_80 = ("--device-total", "80GiB")


Inline = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty directory to run in, where everything a command could create would show up."""
    for name in ("home", "run", "tmp", "work"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def inline(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inline:
    """The same in this process, for what needs no process to be seen: ten times as fast."""
    monkeypatch.setenv("STAGELAUNCH_RUNTIME_DIR", str(place / "run"))
    monkeypatch.chdir(place / "work")

    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        code = main([str(arg) for arg in args])
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(args, code, printed.out, printed.err)

    return run


def environment(place: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "STAGELAUNCH_RUNTIME_DIR": str(place / "run"),
        "STAGELAUNCH_SIMULATED_FILE": str(place / "run" / "simulated"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
    }


def stagelaunch(place: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "stagelaunch", *map(str, args)]
    return subprocess.run(
        command, cwd=place / "work", env=environment(place), capture_output=True, text=True, timeout=30, check=False
    )


def listing(place: Path) -> list[str]:
    return sorted(f"{path.relative_to(place)} {path.lstat().st_mtime_ns}" for path in place.rglob("*"))


def config(place: Path, **fields: Any) -> Path:
    """The tiny deployment with some fields changed; its simulated machine and checkpoint below ``place``."""
    body = yaml.safe_load(TINY.read_text())
    body["simulated"]["file"] = str(place / "run" / "machine")
    path = place / "work" / "demo.yaml"
    path.write_text(yaml.safe_dump({**body, "model": "absent", **fields}))
    return path


def without_model(place: Path) -> Path:
    """The shipped deployment, wherever a checkpoint of the reader may be."""
    path = place / "work" / "h100.yaml"
    path.write_text(H100.read_text().replace("../models", "models"))
    return path


def plan_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def test_plan_for_a_machine_not_at_hand(place: Path) -> None:
    done = stagelaunch(place, "plan", without_model(place), *ON_80, "--json")
    assert done.returncode == 0, done.stderr
    body = plan_json(done)
    assert (body["fits"], body["groups"], body["findings"]) == (True, [[0], [1, 2]], [])
    assert [device["id"] for device in body["devices"]] == [0, 1]
    assert "planned without weight sizes" in done.stderr


def test_plan_as_text_ends_with_the_verdict(inline: Inline) -> None:
    done = inline("plan", H100, *ON_80)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "verdict: fits")


def test_plan_by_uuid_for_a_machine_not_at_hand(place: Path, inline: Inline) -> None:
    text = H100.read_text().replace("devices: [0]", "devices: [GPU-8932f937]").replace("../models", "models")
    path = place / "work" / "uuid.yaml"
    path.write_text(text)
    done = inline("plan", path, "--device-total", "1=80GiB,GPU-8932F937=70GiB", "--json")
    assert done.returncode == 0, done.stderr
    devices = [(item["id"], item["uuid"], item["total_bytes"] // GIB) for item in plan_json(done)["devices"]]
    assert devices == [(1, None, 80), (2, "GPU-8932f937", 70)]


def test_a_plan_that_can_never_fit(place: Path) -> None:
    done = stagelaunch(place, "plan", without_model(place), "--device-total", "0=15GiB,1=12GiB", "--json")
    assert done.returncode == 78
    body = plan_json(done)
    assert body["fits"] is False
    assert [text.partition(":")[0] for text in body["findings"]] == ["device 0", "device 1"]
    for finding in body["findings"]:
        assert f"stagelaunch: {finding}\n" in done.stderr


def test_a_device_that_is_not_there(inline: Inline) -> None:
    done = inline("plan", H100, "--device-total", "0=80GiB", "--json")
    assert done.returncode == 69
    assert "stagelaunch: device 1: asked for by stage 1, stage 2" in done.stderr


def test_cuda_without_a_driver(place: Path) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    done = stagelaunch(place, "plan", H100)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith("stagelaunch: ")


def test_the_simulated_machine_need_not_exist_yet(place: Path) -> None:
    done = stagelaunch(place, "plan", config(place), "--json")
    assert done.returncode == 0, done.stderr
    assert [device["free_bytes"] for device in plan_json(done)["devices"]] == [GIB, GIB]


def test_a_simulated_device_the_machine_does_not_have(place: Path, inline: Inline) -> None:
    path = config(place, simulated={"devices": {0: "1GiB"}, "file": str(place / "run" / "machine")})
    done = inline("plan", path)
    assert done.returncode == 69, done.stderr
    assert "device 1" in done.stderr


def test_memory_that_others_hold_now(place: Path) -> None:
    from stagelaunch.core.inventory import SimulatedMachine
    from stagelaunch.devices.simfile import SimulatedFile

    machine = SimulatedMachine(place / "run" / "machine", {0: GIB, 1: GIB}, 64 * MIB)
    holder = SimulatedFile.open(machine)
    try:
        assert holder.allocate(1, 512 * MIB)
        done = stagelaunch(place, "plan", config(place), "--json")
    finally:
        holder.close()
    assert done.returncode == 2, done.stderr
    body = plan_json(done)
    assert body["fits"] is False
    assert body["devices"][1]["free_bytes"] == GIB - 512 * MIB
    assert f"pid {os.getpid()}" in done.stderr


def test_weights_are_read_from_the_headers(place: Path, inline: Inline, tiny_checkpoint: Path) -> None:
    done = inline("plan", config(place, model=str(tiny_checkpoint)), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(stage["weights_bytes"] > 0 for stage in plan_json(done)["stages"])


def test_a_damaged_checkpoint_is_refused_and_one_that_is_not_there_yet_is_noted(place: Path, inline: Inline) -> None:
    path = config(place, model="broken")
    done = inline("plan", path, "--json")
    assert (done.returncode, "note: planned without weight sizes: no checkpoint in" in done.stderr) == (0, True)
    (place / "work" / "broken").mkdir()
    done = inline("plan", path, "--json")
    assert (done.returncode, "broken: is empty; download the checkpoint into it" in done.stderr) == (78, True)
    assert (plan_json(done)["fits"], len(plan_json(done)["findings"])) == (False, 1)
    assert inline("plan", path).stdout.endswith("verdict: the checkpoint is damaged\n")


@pytest.mark.parametrize(("model", "text"), [("m" * 300, "File name too long"), ("loop", "levels of symbolic links")])
def test_a_checkpoint_whose_path_cannot_be_is_refused(place: Path, inline: Inline, model: str, text: str) -> None:
    (place / "work" / "loop").symlink_to("loop")
    done = inline("plan", config(place, model=model), "--json")
    assert (done.returncode, text in done.stderr, plan_json(done)["fits"]) == (78, True, False)


def test_plan_touches_nothing(place: Path) -> None:
    path = config(place, lock_dir=str(place / "locks"), runtime_dir=str(place / "run" / "deep"))
    before = listing(place)
    assert stagelaunch(place, "plan", path).returncode == 0
    assert stagelaunch(place, "plan", path, "--device-total", "1MiB").returncode == 78
    assert listing(place) == before


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["plam"], "No such command 'plam'"),
        (["plan"], "Missing argument 'CONFIG'"),
        (["plan", H100, "--nope"], "No such option"),
        (["plan", H100, "--device-total"], "requires an argument"),
        (["plan", H100, "--device-total", "80GB"], "cannot read --device-total '80GB'"),
        (["plan", H100, "--device-total", "80"], "80 has no unit"),
        (["plan", H100, "--device-total", "0=80GiB,1=141"], "141 has no unit"),
        (["--nope"], "No such option"),
        ([], "Usage: stagelaunch"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], args: list[str | Path], text: str) -> None:
    assert main([str(arg) for arg in args]) == 64
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err


def test_wrong_usage_as_a_process(place: Path) -> None:
    done = stagelaunch(place, "plan")
    assert (done.returncode, done.stdout) == (64, "")


def test_a_wrong_config_is_one_line_per_fault(place: Path, inline: Inline) -> None:
    path = config(place, order="serail", reserve=True)
    done = inline("plan", path, *ON_80)
    assert (done.returncode, done.stdout) == (78, "")
    assert len(done.stderr.splitlines()) == 2
    assert all(line.startswith(f"stagelaunch: {path}:") for line in done.stderr.splitlines())


def test_a_config_that_is_not_there(inline: Inline) -> None:
    done = inline("plan", "absent.yaml")
    assert (done.returncode, done.stderr) == (78, "stagelaunch: absent.yaml: no such file; check the path\n")


def test_help_and_version_are_data(place: Path) -> None:
    for args in (["plan", "-h"], ["--version"]):
        done = stagelaunch(place, *args)
        assert (done.returncode, done.stderr) == (0, "")
        assert "tagelaunch" in done.stdout


def test_the_schema_command_prints_the_committed_file(inline: Inline) -> None:
    done = inline("schema")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (ROOT / "docs" / "stagelaunch.schema.json").read_text()


def test_doctor_on_a_simulated_machine(place: Path) -> None:
    path = config(place, lock_dir=str(place / "locks"))
    stale = place / "run" / "old"
    stale.mkdir()
    (stale / "state.json").write_text('{"state": "ready", "pid": 1, "start": 1, "boot": "other"}')
    done = stagelaunch(place, "doctor", "--config", path, "--json")
    assert done.returncode == 0, done.stderr
    body = plan_json(done)
    checks = {check["name"]: check for check in body["checks"]}
    assert body["ok"] is True
    assert [device["index"] for device in body["devices"]] == [0, 1]
    assert checks["lock directory"]["ok"] is True
    assert checks["leftovers"]["ok"] is False
    assert str(stale) in checks["leftovers"]["text"]


def test_doctor_names_a_bad_lock_directory(place: Path, inline: Inline) -> None:
    (place / "locks").write_text("a file")
    done = inline("doctor", "--config", config(place, lock_dir=str(place / "locks")))
    assert done.returncode == 78
    assert f"!!  lock directory: cannot use lock directory {place / 'locks'}" in done.stdout


def test_doctor_misses_a_device(place: Path, inline: Inline) -> None:
    path = config(
        place,
        lock_dir=str(place / "locks"),
        simulated={"devices": {0: "1GiB"}, "file": str(place / "run" / "machine")},
    )
    done = inline("doctor", "--config", path)
    assert done.returncode == 69
    assert "!!  devices: device 1 of the config is not there" in done.stdout


SPY = """
import sys
from stagelaunch.cli.main import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "pynvml", "asyncio", "aiohttp") if name in sys.modules]
print(code, *heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        (["plan", str(H100), *ON_80], set()),
        # Asking for the devices goes through devices.query, which also serves the supervisor's loop.
        (["plan", str(TINY)], {"asyncio"}),
        (["--help"], set()),
    ],
)
def test_light_commands_import_nothing_heavy(place: Path, args: list[str], allowed: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPY, *args],
        cwd=ROOT,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    code, *heavy = done.stderr.splitlines()[-1].split()
    assert code == "0"
    assert set(heavy) <= allowed


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], int]:
    """Runs the command line with its ``schema`` command replaced by a function."""

    def run(body: Callable[[], Any]) -> int:
        monkeypatch.setattr("stagelaunch.cli.schema.schema", click.command()(body))
        return main(["schema"])

    return run


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (lambda: None, 0, ""),
        (lambda: ExitCode.CLEANUP_INCOMPLETE, 71, ""),
        (raising(KeyboardInterrupt()), 130, "stagelaunch: interrupted\n"),
        (raising(LockTimeoutError("a\nb")), 75, "stagelaunch: a\nstagelaunch: b\n"),
    ],
)
def test_every_end_has_its_code(
    fake: Callable[[Any], int], capsys: pytest.CaptureFixture[str], body: Any, code: int, text: str
) -> None:
    assert fake(body) == code
    assert capsys.readouterr().err == text


def test_our_bugs_show_their_traceback(fake: Callable[[Any], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert fake(raising(RuntimeError("oops"))) == 70
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert "RuntimeError: oops" in lines
    assert lines[-1].startswith("stagelaunch: internal error: this is a bug in stagelaunch; please report it")


def test_a_reader_that_leaves_early_is_no_error(place: Path) -> None:
    command = f"{sys.executable} -m stagelaunch schema | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")
