"""What is said to somebody who does not listen costs the words, never the time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import IO

import pytest

from stagelaunch.cli import foreground
from stagelaunch.cli.foreground import Voice
from stagelaunch.cli.streams import write_patiently


@pytest.fixture
def pipe() -> Iterator[tuple[int, IO[str]]]:
    """The reading end, and the writing end as a stream; nobody reads unless the test does."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, stream
    os.close(reading)


def fill(stream: IO[str]) -> None:
    os.set_blocking(stream.fileno(), False)
    try:
        while True:
            os.write(stream.fileno(), b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(stream.fileno(), True)


def test_a_pipe_that_nobody_reads_is_given_up_in_time(pipe: tuple[int, IO[str]]) -> None:
    _, stream = pipe
    assert write_patiently(stream, "some words\n", 0.0)
    fill(stream)
    began_s = time.monotonic()
    assert not write_patiently(stream, "more words\n", 0.1)
    assert time.monotonic() - began_s < 5


def test_what_was_left_out_is_counted_once_somebody_reads_again(
    pipe: tuple[int, IO[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, stream = pipe
    monkeypatch.setattr(foreground.sys, "stderr", stream)
    monkeypatch.setattr(foreground, "PATIENCE_S", 0.05)
    voice = Voice(None, None, "", shows_stages=False)
    fill(stream)
    for number in range(3):
        voice.print(f"line {number}", err=True)
    os.set_blocking(reading, False)
    while True:
        try:
            os.read(reading, 1 << 16)
        except BlockingIOError:
            break
    voice.print("the next", err=True)
    os.set_blocking(reading, True)
    assert os.read(reading, 4096) == b"(3 lines were left out here: nobody read them)\nthe next\n"
