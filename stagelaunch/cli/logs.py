"""``stagelaunch logs``: what the stages have written. Reads the files: works whether or not the deployment runs."""

from __future__ import annotations

import os
import select
from pathlib import Path

import click

from stagelaunch.cli.target import find_stages, stage_names
from stagelaunch.core.errors import ExitCode
from stagelaunch.core.logs import prefixed, shown
from stagelaunch.system.log_file import Follower, aside, tail

POLL_S = 0.2


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[TARGET] [STAGE]...")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is new until the deployment ends.")
@click.option(
    "-n", "lines", type=click.IntRange(min=0), default=100, show_default=True, help="How many last lines of each stage."
)
@click.option("--runtime-dir", type=click.Path(path_type=Path), help="Where deployments keep their logs.")
def logs(words: tuple[str, ...], follow: bool, lines: int, runtime_dir: Path | None) -> int:
    """Show the last lines of STAGES of deployment TARGET (all of them if none is named).

    TARGET may be left out where only one deployment here has stages of these names.
    """
    target, stages = find_stages(words, runtime_dir)
    names = stages or stage_names(target.runtime)
    page = _Page(names)
    owner = target.runtime.owner_pidfd() if follow else None
    followers = {name: _begin(page, target.runtime.log(name), name, lines) for name in names}
    try:
        while owner is not None and not select.select([owner], [], [], POLL_S)[0]:
            for name, follower in followers.items():
                page.put(name, follower.poll())
        for name, follower in followers.items():
            page.put(name, follower.finish())
    finally:
        if owner is not None:
            os.close(owner)
    return ExitCode.OK


def _begin(page: _Page, path: Path, name: str, lines: int) -> Follower:
    """The last lines are printed; the follower goes on from there."""
    follower = Follower(path, lines)
    found = follower.poll()
    if len(found) < lines:
        # The log was put aside a short while ago, or never: then there is none before it.
        before = tail(aside(path, 1), lines - len(found))
        page.put(name, [line.encode(errors="replace") for line in before])
    page.put(name, found)
    return follower


class _Page:
    """What is printed: with the stage's name before each line where there are several."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._width = max(map(len, names), default=0) if len(names) > 1 else None

    def put(self, name: str, lines: list[bytes]) -> None:
        for line in map(shown, lines):
            click.echo(line if self._width is None else prefixed(name, self._width, line))
