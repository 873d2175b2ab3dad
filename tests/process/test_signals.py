"""One deployment through all its signals and a restart: reload, dump, reopened logs; what stays as it was, stays."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import IO, Any

import yaml
from deployments import Ran, Site, light_stage


def read_until(stream: IO[str] | None, text: str) -> str:
    assert stream is not None
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"ended without {text!r}: {''.join(lines)}")


def stage(site: Site) -> dict[str, Any]:
    (body,) = json.loads(site.run("status", str(site.config), "--json").stdout)["stages"]
    return dict(body)


def change(site: Site, **top: Any) -> None:
    site.config.write_text(yaml.safe_dump(yaml.safe_load(site.config.read_text()) | top))


def test_signals_and_a_restart_of_a_ready_deployment(tmp_path: Path) -> None:
    site = Site(tmp_path, [light_stage(0, "alpha", 0)])
    up = site.start("up", str(site.write()), "--quiet")
    said = [read_until(up.stderr, "capture -> ready")]
    assert "site: ready" in (up.stdout.readline() if up.stdout else "")
    before = stage(site)

    def send(number: signal.Signals, until: str) -> str:
        up.send_signal(number)
        said.append(read_until(up.stderr, until))
        return said[-1]

    # HUP: what can be taken over is, with every difference; a file that is wrong changes nothing.
    change(site, timeouts={**yaml.safe_load(site.config.read_text())["timeouts"], "stop": "2s"}, reserve="17MiB")
    told = send(signal.SIGHUP, "timeouts.stop: 3s -> 2s")
    assert "reserve: 16MiB -> 17MiB (takes effect at the next `up`)" in told
    good = site.config.read_text()
    site.config.write_text("name: [")
    send(signal.SIGHUP, "nothing was changed")
    site.config.write_text(good)

    # QUIT: all threads, the state, and the stacks of the stages; and it goes on.
    log = tmp_path / "run" / "site" / "logs" / "alpha.log"
    told = send(signal.SIGQUIT, "the stacks of the stages")
    assert "Current thread" in told
    assert "stage alpha: ready, in phase ready" in told
    follow = site.start("logs", "site", "alpha", "-f", "--runtime-dir", str(tmp_path / "run"))
    read_until(follow.stdout, "in dump_stacks")

    # USR1, after an external rotation: the old file has what was written, the new one what comes.
    log.rename(log.with_name("alpha.log.old"))
    up.send_signal(signal.SIGUSR1)
    restarted = site.run("restart", "alpha", "--wait", "--runtime-dir", str(tmp_path / "run"))
    assert restarted.code == 0, restarted.stderr
    after = stage(site)
    assert after["pid"] != before["pid"]
    assert after["restarts"] == 0
    assert after["ledger"]["num_blocks"] == before["ledger"]["num_blocks"]
    assert log.exists()

    up.send_signal(signal.SIGTERM)
    _, rest = up.communicate(timeout=60)
    assert up.returncode == 0, rest
    assert follow.wait(60) == 0
    follow.communicate()
    site.assert_nothing_left(Ran(0, "", "".join(said) + rest))
