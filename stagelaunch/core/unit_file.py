"""The systemd unit of a deployment as text. Pure: ``cli.systemd`` finds the paths and prints it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stagelaunch.core.config import Timeouts
from stagelaunch.core.errors import ExitCode
from stagelaunch.core.service_status import SLACK_S, quiet_bound_s, stop_bound_s
from stagelaunch.core.stop_plan import KILL_WAIT_S, STRAYS_S

WATCHDOG_S = 30
RESTART_S = 15
NOT_AGAIN = (ExitCode.USAGE, ExitCode.CONFIG)
"""Ends that a restart cannot mend."""


@dataclass(frozen=True)
class Service:
    """What a unit is made of. Paths are absolute."""

    name: str
    """Of the deployment."""
    command: tuple[str, ...]
    """``up`` with its arguments, the executable first."""
    timeouts: Timeouts
    mounts: tuple[str, ...] = ()
    """What must be mounted before it starts: the config, the checkpoint, the lock directory."""
    user: str | None = None
    runtime_directory: str | None = None
    """Below /run, made by systemd; None where the config names one."""


def unit_name(deployment: str) -> str:
    """``stagelaunch-NAME.service``: a deployment's name needs no escaping in it."""
    return f"stagelaunch-{deployment}.service"


def unit_text(service: Service) -> str:
    """The unit, with comments where a number is not obvious.

    ValueError for a path that a unit cannot carry.
    """
    limits = service.timeouts
    start_s, stop_s = _whole(quiet_bound_s(limits)), _whole(stop_bound_s(limits))
    lines = [
        f"# {unit_name(service.name)}, made by `stagelaunch systemd`; make it anew when timeouts of the config change",
        "[Unit]",
        f"Description=stagelaunch deployment {service.name}",
        "After=nvidia-persistenced.service",
        *(f"RequiresMountsFor={_quoted(path)}" for path in service.mounts),
        "# Memory that others hold may come back at any time: it is tried again for as long as it takes.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",
        "# The supervisor reports, and is not the main process.",
        "NotifyAccess=all",
        f"ExecStart={command_line(service.command)}",
        "# Takes over what can be taken over without a restart, and prints the difference to the journal.",
        "ExecReload=kill -HUP $MAINPID",
        *_place(service),
        "",
        "# Until the first sign of progress, and from one to the next: each asks for as much again. The longest of",
        f"# timeouts.phase ({limits.phase_s:g}s), timeouts.lock ({limits.lock_s:g}s) and timeouts.driver "
        f"({limits.driver_s:g}s), and a slack: our own deadlines come first.",
        f"TimeoutStartSec={start_s}s",
        f"# timeouts.stop ({limits.stop_s:g}s), {KILL_WAIT_S:g}s for the kernel to remove what was killed, "
        f"timeouts.memory ({limits.memory_s:g}s), timeouts.driver ({limits.driver_s:g}s),",
        f"# {STRAYS_S:g}s for what stages have left, and {SLACK_S:g}s.",
        f"TimeoutStopSec={stop_s}s",
        f"WatchdogSec={WATCHDOG_S}s",
        "",
        "# A stop is asked of the main process, which asks the stages; what is left at its end is killed by systemd.",
        "KillMode=mixed",
        "# Stages get control groups of their own below the unit's.",
        "Delegate=yes",
        "# A stage that the kernel's memory killer ends is the supervisor's to report.",
        "OOMPolicy=continue",
        "# Stages pin host memory.",
        "LimitMEMLOCK=infinity",
        "",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}s",
        "# Wrong usage or config: the same again would end the same way.",
        f"RestartPreventExitStatus={' '.join(str(int(code)) for code in NOT_AGAIN)}",
        "# Stopped while it booted.",
        f"SuccessExitStatus={int(ExitCode.INTERRUPTED)}",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _place(service: Service) -> list[str]:
    """Whose processes they are, and where they keep sockets and logs."""
    lines = [] if service.user is None else [f"User={service.user}"]
    if service.runtime_directory is not None:
        lines += [
            f"RuntimeDirectory={service.runtime_directory}",
            "# Other deployments live in it, and the logs of the last run stay readable.",
            "RuntimeDirectoryPreserve=yes",
        ]
    return lines


def command_line(words: Sequence[str]) -> str:
    """The value of an ExecStart= that runs exactly ``words``. ValueError for what systemd cannot be told."""
    # Without variables in it at all: `$$` would not do, since in the executable's own path no `$` is expanded.
    prefix = ":" if any("$" in word for word in words) else ""
    first, *rest = words
    if any(char in "\"'\\" or not char.isprintable() for char in first):
        raise ValueError(
            f"systemd runs no program with quotes, backslashes or control characters in its path: {first!r}"
        )
    return " ".join(_quoted(word) for word in (prefix + first, *rest))


def _quoted(word: str) -> str:
    if any(0xD800 <= ord(char) <= 0xDFFF or char == "\0" for char in word):
        raise ValueError(f"{word!r} is not UTF-8")
    escaped = "".join(_ESCAPES.get(char) or (char if char.isprintable() else _hex(char)) for char in word)
    plain = word and all(char.isalnum() or char in "/._-+:=@,%" for char in word)
    return escaped if plain else f'"{escaped}"'


_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%"}


def _hex(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode())


def _whole(duration_s: float) -> int:
    return math.ceil(duration_s)
