"""How a line of a log is shown, which files move when it is put aside, and which deployment a stage's name means."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stagelaunch.cli.target import find_stages
from stagelaunch.core.errors import UsageError
from stagelaunch.core.logs import MAX_LINE_CHARS, prefixed, shifts, shown
from stagelaunch.supervisor.logs import put_aside
from stagelaunch.supervisor.runtime import Runtime
from stagelaunch.system.log_file import Follower, mark, tail


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain\ttext", "plain\ttext"),
        ("\u00fcber".encode(), "\u00fcber"),
        (b"\x1b[2Jgone\x07", "\\x1b[2Jgone\\x07"),
        (b"\xff", "\ufffd"),
        (b"10 %\r20 %\r30 %\r", "30 %"),
        (b"x" * MAX_LINE_CHARS, "x" * MAX_LINE_CHARS),
        (b"x" * (MAX_LINE_CHARS + 1), "x" * MAX_LINE_CHARS + "..."),
    ],
)
def test_a_line_is_shown_without_harm(line: bytes, text: str) -> None:
    assert shown(line) == text


def test_a_line_of_any_content_fits_what_a_pipe_takes_at_once() -> None:
    widest = prefixed("n" * 48, 48, shown("\U0001f600".encode() * 5000))
    assert len(widest.encode()) < 4096


@pytest.mark.parametrize(
    ("numbers", "keep", "moves"),
    [
        ((0,), 3, ((0, 1),)),
        ((0, 1, 2, 3), 3, ((3, None), (2, 3), (1, 2), (0, 1))),
        ((0, 1, 5), 2, ((5, None), (1, 2), (0, 1))),
        ((0, 1), 0, ((1, None), (0, None))),
    ],
)
def test_putting_aside(
    numbers: tuple[int, ...], keep: int, moves: tuple[tuple[int, int | None], ...], tmp_path: Path
) -> None:
    assert shifts(numbers, keep) == moves
    log = tmp_path / "a.log"
    for number in numbers:
        (tmp_path / (f"a.log.{number}" if number else "a.log")).write_text(str(number))
    (tmp_path / "a.log.old").touch()
    put_aside(log, keep)
    left = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != "a.log.old"}
    assert left == {f"a.log.{target}": str(number) for number, target in moves if target is not None}


def test_the_evidence_of_a_run_is_found_on_both_sides_of_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("of an earlier run\n")
    begin = mark(log)
    with log.open("a") as file:
        file.write("first\nsecond\n")
    put_aside(log, 1)
    assert tail(log, 5, begin) == ("first", "second")
    log.write_text("third\nfourth")
    assert tail(log, 5, begin) == ("first", "second", "third", "fourth")
    assert tail(log, 3, begin) == ("second", "third", "fourth")
    assert tail(log, 9) == ("of an earlier run", "first", "second", "third", "fourth")
    assert tail(tmp_path / "none.log", 3) == ()


@pytest.mark.parametrize("lines", [0, 1, 2, 5000, 90_000])
def test_the_last_lines_of_a_long_log(tmp_path: Path, lines: int) -> None:
    log = tmp_path / "a.log"
    written = [b"line %d" % number for number in range(50_000)] + [b"", b"end"]
    log.write_bytes(b"\n".join(written) + b"\n")
    last = written[-lines:] if lines else []
    assert tail(log, lines) == tuple(line.decode() for line in last)
    assert Follower(log, lines).finish() == last


def test_what_is_written_to_a_log_just_put_aside_is_still_followed(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("wb", buffering=0) as old:
        follower = Follower(log)
        put_aside(log, 0)
        log.touch()
        follower.poll()
        follower.poll()
        old.write(b"late\n")
        assert follower.poll() == [b"late"]
    follower.close()


def test_a_follower_that_is_far_behind_leaves_lines_out_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    follower = Follower(log, backlog_bytes=1 << 17)
    log.write_bytes(b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 5000)
    found = follower.finish()
    assert found[0].startswith(b"... 4")
    assert found[-1] == b"y" * 99
    assert len(found) < 700


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Deployments omni (stages thinker, talker) and tts (talker); and one named thinker without a log."""
    monkeypatch.setenv("STAGELAUNCH_RUNTIME_DIR", str(tmp_path))
    for name, stages in {"omni": ("thinker", "talker"), "tts": ("talker",)}.items():
        runtime = Runtime.of(name)
        runtime.create()
        runtime.write_state("ended")
        for stage in stages:
            runtime.log(stage).touch()
    Runtime.of("omni").run_file.write_text(json.dumps([{"name": "code2wav"}]))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "deployment", "stages"),
    [
        (["omni"], "omni", ()),
        (["omni", "talker"], "omni", ("talker",)),
        (["thinker"], "omni", ("thinker",)),
        (["talker", "thinker"], "omni", ("talker", "thinker")),
        (["code2wav"], "omni", ("code2wav",)),
    ],
)
def test_which_stages_are_meant(base: Path, words: list[str], deployment: str, stages: tuple[str, ...]) -> None:
    target, found = find_stages(words, None)
    assert (target.name, found) == (deployment, stages)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a deployment"),
        (["talker"], "several deployments: omni, tts"),
        (["omni", "decoder"], "decoder: no such stage in deployment omni (there are: code2wav, talker, thinker)"),
        (["nobody"], "omni: code2wav, talker, thinker; tts: talker"),
        (["thinker", "decoder"], "neither a deployment nor a stage"),
    ],
)
def test_who_cannot_be_told_is_asked_for(base: Path, words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_stages(words, None)
    assert said in str(caught.value)


def test_a_deployment_wins_over_a_stage_of_its_name(base: Path) -> None:
    os.mkdir(base / "thinker")
    target, stages = find_stages(["thinker"], None)
    assert (target.name, stages) == ("thinker", ())
