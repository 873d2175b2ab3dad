"""A boot's record, its critical path and floor, and how they are shown, from messages alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagelaunch.cli.main import main
from stagelaunch.core import messages as m
from stagelaunch.core import timeline as tl
from stagelaunch.core.critical import LinkKind, Section, critical_path, floor, one_at_a_time_s
from stagelaunch.core.phases import LockMode, Phase
from stagelaunch.core.run_spec import StageRun
from stagelaunch.core.timeline import Attempt, Timeline
from stagelaunch.core.timeline_text import render, report_json
from stagelaunch.core.trace import to_trace
from stagelaunch.core.units import MIB
from stagelaunch.supervisor import timeline as recording
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.supervisor.timeline import TimelineRecorder

ZERO_S = 100.0
EXCLUSIVE = LockMode.EXCLUSIVE


def stage(stage_id: int, name: str, device: int, spawned_s: float, *messages: m.Message) -> Attempt:
    attempt = tl.begun(stage_id, name, device, 4000 + stage_id, spawned_s)
    for message in messages:
        attempt = tl.apply(attempt, message, ZERO_S)
    return attempt


def at(time_s: float) -> float:
    return ZERO_S + time_s


def load(begin_s: float, end_s: float) -> tuple[m.Message, ...]:
    size = 64 * MIB
    return (
        m.PhaseBegan(Phase.LOAD, at(begin_s)),
        m.Progress(Phase.LOAD, size // 2, size, "bytes", at(begin_s)),
        m.Progress(Phase.LOAD, size, size, "bytes", at(end_s)),
        m.PhaseEnded(Phase.LOAD, at(end_s), 0.0),
    )


def profile(begin_s: float, taken_s: float, end_s: float, holder: str = "") -> tuple[m.Message, ...]:
    waits = (m.LockWaits(Phase.PROFILE, EXCLUSIVE, (holder,), at(begin_s)),) if holder else ()
    return (
        m.PhaseBegan(Phase.PROFILE, at(begin_s)),
        *waits,
        m.LockTaken(Phase.PROFILE, EXCLUSIVE, taken_s - begin_s, at(taken_s)),
        m.LockReleased(Phase.PROFILE, EXCLUSIVE, at(end_s)),
        m.PhaseEnded(Phase.PROFILE, at(end_s), taken_s - begin_s),
    )


TALKER = stage(1, "talker", 1, 0.0, *load(1, 4), *profile(4, 4, 9), m.Ready(at(9)))
CODE2WAV = stage(2, "code2wav", 1, 0.5, *load(1, 3), *profile(5, 9.25, 12, "talker"), m.Ready(at(12)))
BOOT = Timeline("omni", 1.8e9, "overlap", ((1, 2),), (TALKER, CODE2WAV), 12.0, "ready", 12.0)


def chain(timeline: Timeline) -> list[tuple[str, str, str, float]]:
    return [(link.kind, link.stage, link.phase, link.took_s) for link in critical_path(timeline)]


def test_the_critical_path_goes_through_a_wait_to_whoever_let_the_lock_go() -> None:
    assert chain(BOOT) == [
        ("work", "talker", "spawn", 1.0),
        ("work", "talker", "load", 3.0),
        ("work", "talker", "profile", 5.0),
        ("hand-over", "code2wav", "profile", 0.25),
        ("work", "code2wav", "profile", 2.75),
    ]
    bound = floor(BOOT)
    assert bound is not None
    # 4 s before the first exclusive section, 5 and 2.75 s of them; code2wav may come first, but then it starts at 4.5.
    assert (bound.floor_s, bound.device) == (11.75, 1)


def test_a_wait_for_a_stranger_a_serial_start_and_a_second_process_are_links_too() -> None:
    stranger = stage(0, "thinker", 0, 0.5, *profile(1, 4, 5, "pid 7 (other/stage)"), m.Ready(at(5)))
    assert chain(replace(BOOT, attempts=(stranger,), boot_s=5.0)) == [
        ("start", "thinker", "spawn", 0.5),
        ("work", "thinker", "spawn", 0.5),
        ("wait", "thinker", "profile", 3.0),
        ("work", "thinker", "profile", 1.0),
    ]
    bound = floor(replace(BOOT, attempts=(stranger,), boot_s=5.0))
    assert bound is not None
    assert bound.floor_s == 1.5
    second = stage(2, "code2wav", 1, 9.5, *load(10, 14), m.Ready(at(14)))
    serial = replace(BOOT, attempts=(TALKER, second), order="serial", boot_s=14.0)
    assert [(link.kind, link.after) for link in critical_path(serial)][-3:] == [
        (LinkKind.START, "talker"), (LinkKind.WORK, ""), (LinkKind.WORK, ""),
    ]  # fmt: skip
    failed = tl.ended(stage(2, "code2wav", 1, 0.0, m.Failed(Phase.LOAD, "E", "", "", 1, at(3))), 3.5, "exit code 1")
    retried = replace(
        BOOT, attempts=(failed, stage(2, "code2wav", 1, 4.0, *load(10, 14), m.Ready(at(14)))), boot_s=14.0
    )
    assert chain(retried)[:2] == [("work", "code2wav", "spawn", 3.5), ("start", "code2wav", "spawn", 0.5)]
    bound = floor(retried)
    assert bound is not None
    assert bound.floor_s == 3.0 + 10.0


def test_one_at_a_time_is_exact_for_the_textbook_case() -> None:
    # Carlier's example: heads, lengths, tails.
    rows = zip((10, 13, 11, 20, 30, 0, 30), (5, 6, 7, 4, 3, 6, 2), (7, 26, 24, 21, 8, 17, 0))
    assert one_at_a_time_s([Section(*row, EXCLUSIVE, 0) for row in rows]) == 49


def test_messages_that_make_no_sense_neither_raise_nor_go_back_in_time() -> None:
    odd = stage(
        0, "x", 0, 5.0,
        m.LockReleased(Phase.LOAD, EXCLUSIVE, at(6)),
        m.PhaseEnded(Phase.LOAD, at(float("nan")), 0.0),
        m.PhaseBegan(Phase.LOAD, at(2)),
        m.LockWaits(Phase.LOAD, EXCLUSIVE, (), at(7)),
        m.LockWaits(Phase.LOAD, EXCLUSIVE, (), at(8)),
        m.PhaseBegan(Phase.PROFILE, at(9)),
        m.LockTaken(Phase.PROFILE, EXCLUSIVE, 1.0, at(1)),
        m.PhaseBegan(Phase.READY, at(9)),
        m.PhaseBegan(Phase.SIZE, at(1e300)),
        m.Progress(Phase.PROFILE, 10**30, 1, "bytes", at(9)),
        m.Ready(at(10)),
        m.PhaseBegan(Phase.LOAD, at(11)),
    )  # fmt: skip
    parts = tl.pieces(odd, 20.0)
    assert [(piece.phase, piece.began_s, piece.ended_s) for piece in parts] == [
        ("load", 5.0, 7.0), ("load", 7.0, 9.0), ("profile", 9.0, 10.0),
    ]  # fmt: skip
    assert tl.waited_s(parts) == 2.0
    timeline = replace(BOOT, attempts=(odd,), boot_s=10.0)
    assert tl.from_json(json.loads(tl.to_text(timeline))) == timeline
    assert json.loads(tl.to_text(BOOT)) == json.loads(json.dumps(tl.to_json(BOOT)))
    assert sum(link.took_s for link in critical_path(timeline)) == 10.0


def test_a_lock_that_is_taken_twice_or_out_of_a_phase_is_held_once_or_not_at_all() -> None:
    odd = stage(
        0, "x", 0, 0.0,
        m.PhaseBegan(Phase.PROFILE, at(1)),
        m.LockTaken(Phase.PROFILE, EXCLUSIVE, 0.0, at(2)),
        m.LockWaits(Phase.PROFILE, EXCLUSIVE, (), at(3)),
        m.LockTaken(Phase.PROFILE, EXCLUSIVE, 0.0, at(4)),
        m.LockTaken(Phase.PROFILE, LockMode.SHARED, 0.0, at(5)),
        m.PhaseEnded(Phase.PROFILE, at(6), 0.0),
        m.LockWaits(Phase.PROFILE, EXCLUSIVE, (), at(7)),
        m.LockTaken(Phase.PROFILE, EXCLUSIVE, 0.0, at(7)),
        m.PhaseBegan(Phase.PROFILE, at(8)),
        m.Ready(at(10)),
    )  # fmt: skip
    assert [(piece.mode, piece.began_s, piece.ended_s) for piece in tl.pieces(odd, 20.0)][1:] == [
        ("none", 1.0, 2.0), (EXCLUSIVE, 2.0, 3.0), ("none", 3.0, 4.0), (EXCLUSIVE, 4.0, 5.0),
        (LockMode.SHARED, 5.0, 6.0),
        ("none", 6.0, 10.0),
    ]  # fmt: skip
    both = replace(BOOT, attempts=(odd, replace(odd, stage="y")), boot_s=10.0)
    assert tl.from_json(json.loads(tl.to_text(both))) == both
    bound = floor(replace(both, attempts=(*both.attempts, *(replace(odd, stage=f"y{i}") for i in range(9)))))
    assert bound is not None
    assert bound.floor_s == 10.0


def test_the_page_says_what_took_how_long_and_what_to_change() -> None:
    page = render(BOOT)
    assert "omni: booted in 12.00s, overlap order, started 2027-01-15 08:00:00 UTC" in page
    bar = next(line for line in page.splitlines() if line.startswith("code2wav |"))
    assert [bar.count(char) for char in "sLP."] == [3, 24, 16, 26]
    assert "64.00 MiB  32.00 MiB/s" in page
    assert "profile: takes over the device lock from talker" in page
    assert "boot 12.00s, floor 11.75s (what cannot overlap on device 1), 1.02 of it" in page
    assert "order: overlap lets" in render(replace(BOOT, order="serial", attempts=(TALKER,), boot_s=20.0))
    failed = replace(BOOT, boot_s=None, state="failed", failure="stage talker failed in phase load: gone", as_of_s=4.0)
    assert "failed, not booted" in render(failed)
    assert "stage talker failed in phase load: gone" in render(failed)
    assert "critical path" not in render(failed)
    again = replace(BOOT, attempts=(*BOOT.attempts, stage(1, "talker", 1, 50.0, m.Ready(at(51)))))
    assert "started again after the boot" in render(again)
    assert [link.stage for link in critical_path(again)] == [link.stage for link in critical_path(BOOT)]


def assert_is_a_trace(body: dict[str, Any]) -> None:
    """The required fields of the Trace Event Format, by kind of event; what lies inside a slice does not stick out."""
    assert json.loads(json.dumps(body)) == body
    required = {"X": {"cat", "ts", "dur"}, "M": {"args"}, "s": {"cat", "id", "ts"}, "f": {"cat", "id", "ts", "bp"}}
    for event in body["traceEvents"]:
        assert required[event["ph"]] | {"name", "pid", "tid"} <= event.keys()
        # Perfetto merges what is of 0 with others.
        assert all(isinstance(event[key], int) and event[key] > 0 for key in ("pid", "tid"))
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "dur") if key in event)
    flows = [[event["id"] for event in body["traceEvents"] if event["ph"] == kind] for kind in "sf"]
    assert flows[0] == flows[1]
    slices = [event for event in body["traceEvents"] if event["ph"] == "X"]
    for inner in (event for event in slices if event["cat"] == "lock-wait"):
        assert any(
            outer["cat"] == "phase" and (outer["pid"], outer["tid"]) == (inner["pid"], inner["tid"])
            and outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
            for outer in slices
        )  # fmt: skip


def test_the_trace_has_what_the_format_requires() -> None:
    body = to_trace(BOOT)
    assert_is_a_trace(body)
    assert_is_a_trace(to_trace(replace(BOOT, attempts=(replace(TALKER, stage_id=0, device=0), CODE2WAV))))
    waits = [event for event in body["traceEvents"] if event.get("cat") == "lock-wait"]
    assert [(event["ts"], event["dur"], event["args"]["held by"]) for event in waits] == [(5e6, 4.25e6, ["talker"])]
    assert [event["ts"] for event in body["traceEvents"] if event["ph"] in "sf"] == [9e6, 9.25e6]
    names = [event["args"]["name"] for event in body["traceEvents"] if event["ph"] == "M"]
    assert names == ["device 1", "talker", "code2wav"]


# The command.


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_command_finds_the_only_one_and_writes_what_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "omni" / "timeline.json", json.dumps(tl.to_json(BOOT)))
    write(tmp_path / "omni" / "state.json", "{}")
    files = ["--json", str(tmp_path / "report.json"), "--trace", str(tmp_path / "trace.json")]
    assert main(["report", "--runtime-dir", str(tmp_path), *files]) == 0
    assert capsys.readouterr().out == render(BOOT) + "\n"
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report_json(BOOT)))
    assert json.loads((tmp_path / "trace.json").read_text()) == to_trace(BOOT)
    assert main(["report", "omni", "--runtime-dir", str(tmp_path), "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["version"], body["boot_s"], body["floor_s"]) == (1, 12.0, 11.75)
    assert [each["phases"][-1]["waited_s"] for each in body["stages"]] == [0.0, 4.25]
    assert main(["report", "omni", "--runtime-dir", str(tmp_path), "--json", "-", "--trace", "-"]) == 64
    nowhere = str(tmp_path / "none" / "trace")
    assert main(["report", "omni", "--runtime-dir", str(tmp_path), "--trace", nowhere]) == 75
    assert f"cannot write --trace {nowhere}: No such file" in capsys.readouterr().err


def test_what_is_under_way_goes_on_until_now_while_its_supervisor_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    booting = replace(
        BOOT, attempts=(stage(1, "talker", 1, 0.0, *load(1, 4)[:1]),), as_of_s=2.0, state="booting", boot_s=None
    )
    write(tmp_path / "omni" / "timeline.json", json.dumps(tl.to_json(booting)))
    monkeypatch.setattr(time, "time", lambda: booting.started_at + 30)
    for pid, until in ((None, "2.00s"), (7, "30.00s")):
        monkeypatch.setattr(Runtime, "live_pid", lambda _, pid=pid: pid)
        assert main(["report", "omni", "--runtime-dir", str(tmp_path)]) == 0
        assert f"booting, not booted, as of {until}" in capsys.readouterr().out


def with_first_phase(body: dict[str, Any], **what: Any) -> str:
    first = body["attempts"][0]
    phases = [{**first["phases"][0], **what}, *first["phases"][1:]]
    return json.dumps({**body, "attempts": [{**first, "phases": phases}]})


HELD = {"mode": "shared", "asked_s": 0.0, "taken_s": 0.0, "released_s": None, "holders": []}

DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "it is not JSON": lambda body: "{",
    "it is not a timeline": lambda body: json.dumps({"version": 1}),
    "it has version 2, not 1": lambda body: json.dumps({**body, "version": 2}),
    "it is damaged (KeyError: 'order')": lambda body: json.dumps({k: v for k, v in body.items() if k != "order"}),
    "the phases of stage talker are in no order": lambda body: json.dumps(
        {**body, "attempts": [{**body["attempts"][0], "spawned_s": 2.0}]}
    ),
    "nan is not a time": lambda body: json.dumps({**body, "boot_s": float("nan")}),
    "-1 is not a time": lambda body: json.dumps({**body, "boot_s": -1}),
    "1e+300 is not a time": lambda body: json.dumps({**body, "started_at": 1e300}),
    "the phases of stage talker are in": lambda body: with_first_phase(body, phase="load"),
    "the phases of stage talker": lambda body: with_first_phase(body, began_s=0.5),
    "the boot ended after 13s, its last stage was ready after 12s": lambda body: json.dumps({**body, "boot_s": 13.0}),
    "stage talker does two things at once": lambda body: with_first_phase(body, ended_s=None),
    "talker does two things": lambda body: with_first_phase(body, holds=[HELD, HELD]),
    "does two things": lambda body: with_first_phase(body, holds=[HELD]),
    "two things": lambda body: with_first_phase(body, holds=[{**HELD, "taken_s": None, "released_s": 0.0}]),
    "ready is no phase of a boot": lambda body: with_first_phase(body, phase="ready"),
    "0 is not a size": lambda body: with_first_phase(body, done_bytes=10**30),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_what_is_no_timeline_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str) -> None:
    write(tmp_path / "omni" / "timeline.json", DAMAGE[said](tl.to_json(BOOT)))
    assert main(["report", "omni", "--runtime-dir", str(tmp_path)]) == 78
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert f"cannot read {tmp_path}/omni/timeline.json: " in err
    assert said in err


def test_a_deployment_without_a_timeline_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "omni", "--runtime-dir", str(tmp_path)]) == 1
    assert "cannot report on omni: it has started no stage" in capsys.readouterr().err
    assert main(["report", "--runtime-dir", str(tmp_path)]) == 1
    assert "no deployment has booted here" in capsys.readouterr().err
    for name in ("alpha", "beta"):
        write(tmp_path / name / "timeline.json", "{}")
        write(tmp_path / name / "state.json", "{}")
    assert main(["report", "--runtime-dir", str(tmp_path)]) == 64
    assert "name a deployment: alpha, beta" in capsys.readouterr().err


# The recorder.


def run_of(name: str, stage_id: int) -> StageRun:
    fields = dict.fromkeys(StageRun.__dataclass_fields__)
    return StageRun(**{**fields, "name": name, "stage_id": stage_id, "device_index": 0})  # type: ignore[arg-type]


def recorded(path: Path) -> Timeline:
    return tl.from_json(json.loads(path.read_text()))


def test_the_file_is_of_this_run_at_once_follows_it_and_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "WRITE_EVERY_S", 0.0)
    monkeypatch.setattr(recording, "KEPT_RESTARTS", 2)
    path, said = tmp_path / "timeline.json", []

    async def scenario() -> None:
        path.write_text(json.dumps(tl.to_json(BOOT)))
        recorder = TimelineRecorder(path, "omni", "overlap", ((0,), (1,)), said.append)
        assert (recorded(path).attempts, recorded(path).state) == ((), "booting")
        written = asyncio.Event()
        write_it = recording.write_atomically
        monkeypatch.setattr(recording, "write_atomically", lambda *what: (write_it(*what), written.set()))
        now_s = asyncio.get_running_loop().time
        for stage_id in (0, 1):
            recorder.started(run_of(f"stage{stage_id}", stage_id), now_s())
            recorder.runs(stage_id, 7)
        recorder.heard(0, m.PhaseBegan(Phase.IMPORT, now_s()))
        await written.wait()
        assert [len(attempt.phases) for attempt in recorded(path).attempts] == [2, 1]
        for stage_id in (0, 1):
            recorder.heard(stage_id, m.Ready(now_s()))
        recorder.ready()
        assert recorded(path).boot_s == recorded(path).attempts[1].ready_s
        for pid in (8, 9, 10):
            recorder.over(0, "SIGKILL")
            recorder.started(run_of("stage0", 0), now_s())
            recorder.runs(0, pid)
        recorder.heard(0, m.Ready(now_s()))
        path.unlink()
        path.mkdir()
        recorder.failed("stage stage1 failed")
        recorder.restore()
        path.rmdir()
        recorder.close()

    asyncio.run(scenario())
    assert said == [f"cannot record the timeline in {path}: Is a directory"]
    kept = recorded(path)
    assert (kept.state, kept.failure) == ("failed", "stage stage1 failed")
    assert [(attempt.pid, attempt.how, attempt.ready_s is not None) for attempt in kept.attempts] == [
        (7, "SIGKILL", True), (7, "", True), (9, "SIGKILL", False), (10, "", True),
    ]  # fmt: skip
    assert [attempt.pid for attempt in kept.restarts] == [9, 10]


def test_what_is_heard_of_a_stage_that_was_restarted_long_ago_stays_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "KEPT_RESTARTS", 2)
    path = tmp_path / "timeline.json"

    async def scenario() -> None:
        recorder = TimelineRecorder(path, "omni", "overlap", ((0,), (1,)), lambda said: None)
        now_s = asyncio.get_running_loop().time
        # Each was started twice for its boot: more processes than stages, and none of them is a restart.
        for stage_id in (0, 1) * 2:
            recorder.started(run_of(f"stage{stage_id}", stage_id), now_s())
        for stage_id in (0, 1):
            recorder.heard(stage_id, m.Ready(now_s()))
        recorder.ready()
        for pid, stage_id in enumerate((0, 1, 1, 1, 1)):
            recorder.started(run_of(f"stage{stage_id}", stage_id), now_s())
            recorder.runs(stage_id, pid)
        recorder.over(0, "of stage0")
        recorder.close()

    asyncio.run(scenario())
    assert [(each.stage, each.pid, each.how) for each in recorded(path).restarts] == [
        ("stage0", 0, "of stage0"), ("stage1", 3, ""), ("stage1", 4, ""),
    ]  # fmt: skip
