"""What goes over the wire comes back the same."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from stagelaunch.core import errors
from stagelaunch.core import messages as m
from stagelaunch.core.engine_spec import EngineSpec
from stagelaunch.core.inventory import DeviceInfo, DeviceProcess, SimulatedMachine, device_from_json, device_to_json
from stagelaunch.core.ledger import Ledger, Source, Term
from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.core.run_spec import StageRun, run_from_json, runs_to_json

TERM, TWO = Term(7, Source.MEASURED), Term(7, Source.OWN_PID, 6)
LEDGER = Ledger(TERM, TWO, TERM, TERM, TWO, TERM, TERM, TERM, 5, 3, 4, held_bytes=9)
MESSAGES: tuple[m.Message, ...] = (
    m.PhaseBegan(Phase.LOAD, 1.5),
    m.LockWaits(Phase.LOAD, LockMode.SHARED, ("pid 1", "pid 2"), 1.5),
    m.LockTaken(Phase.LOAD, LockMode.SHARED, 0.5, 2.0),
    m.LockReleased(Phase.LOAD, LockMode.SHARED, 2.5),
    m.PhaseEnded(Phase.LOAD, 3.0, 0.5),
    m.Progress(Phase.LOAD, 1, 2, "bytes", 2.5),
    m.LedgerKnown(LEDGER, True),
    m.LedgerKnown(replace(LEDGER, held_bytes=None), False),
    m.Ready(4.0),
    m.Failed(Phase.LOAD, "OSError", "no \u00fc\n", "Traceback", 1, 5.0),
    m.Failed(Phase.CAPTURE, "BudgetOvershootError", "over", "Traceback", 1, 5.0, retry=True, overshoot_bytes=7),
    m.Probed(3, 1, True, 0.0, (1, 2), 0.1),
    m.Probed(3, 0, False, float("inf"), (), 0.1, error="gone"),
    m.Probe(3),
    m.Stop(),
    m.Ping(3),
    m.Pong(3),
    m.ReopenLog(),
    m.DumpStacks(),
    m.StacksDumped(),
    m.LogLost("cannot open it"),
)


def test_every_kind_of_message_is_here() -> None:
    assert {type(message) for message in MESSAGES} == set(m.Message.__args__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: m.Message) -> None:
    line = m.encode(message)
    assert line.count(b"\n") == 1
    assert m.decode(line) == message


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b"null", b'{"kind":"Nope"}', b'{"kind":"Ready"}', b'{"kind":"Ready","at_s":1,"x":2}',
             b'{"kind":"PhaseBegan","phase":"lunch","at_s":1}',
             b'{"kind":"Ready","at_s":"x"}', b'{"kind":"Failed","phase":"load"}', b"\xff\xfe",
             b"[" * 200_000, b'{"kind":"LedgerKnown","final":true,"ledger":{"num_blocks":Infinity}}'],
)  # fmt: skip
def test_what_is_not_a_message_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        m.decode(line)


def test_a_run_survives_its_file() -> None:
    machine = SimulatedMachine(Path("/m"), {0: 10, 1: 20}, 5, 1.5)
    run = StageRun(
        "d", 3, "talker", "simulated", 1, "SIM-1", machine, Path("/l"), 2.5, "e",
        EngineSpec("talker", Path("/c"), "auto", 1, 2, 3, 4, (8, 4), {"a": "b"}), 0.5, None, {"X": "1"},
        Path("/log"), "c0ffee",
    )  # fmt: skip
    assert run_from_json(runs_to_json((run,)), 3) == run
    with pytest.raises(KeyError):
        run_from_json(runs_to_json((run,)), 4)


def test_a_device_survives_json() -> None:
    info = DeviceInfo(1, "GPU-1", "H100", 10, 5, (DeviceProcess(7, "python", None), DeviceProcess(8, "x", 3)))
    assert device_from_json(device_to_json(info)) == info


def test_errors_survive_pickling_and_carry_documented_codes() -> None:
    fault = errors.Fault("f", 3, "k", "wrong")
    for error in (errors.ConfigError((fault,)), errors.NeverFitsError(("a", "b")), errors.LockTimeoutError("late")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.exit_code) == (type(error), str(error), error.exit_code)
    assert str(errors.ConfigError((fault,))) == "f:3: k: wrong"
    assert set(errors.EXIT_CODE_MEANINGS) == set(errors.ExitCode)


def test_every_exit_code_is_in_the_readme() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for code in errors.ExitCode:
        assert f"| {int(code)} |" in readme


def test_an_overshoot_reads_as_its_text() -> None:
    assert str(errors.BudgetOvershootError("over by 5", 5)) == "over by 5"


def test_an_overshoot_is_worth_a_retry_only_with_kv_cache_to_cut() -> None:
    assert [errors.BudgetOvershootError("over", size).retry for size in (5, 0)] == [True, False]
