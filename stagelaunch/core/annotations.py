"""Workflow commands of GitHub Actions: lines that its runner takes out of the output and acts on. Pure."""

from __future__ import annotations

MAX_MESSAGE_CHARS = 4_000
"""Longer ones are cut by the service, at a place of its own choosing."""


def error(title: str, message: str) -> str:
    """An error at the top of the run's page."""
    return f"::error title={_property(title)}::{_data(message[:MAX_MESSAGE_CHARS])}"


def group(title: str) -> str:
    """What follows, until ``end_group``, is folded under this title."""
    return f"::group::{_data(title)}"


def end_group() -> str:
    """See ``group``."""
    return "::endgroup::"


def stop_commands(token: str) -> str:
    """No line is a command any more until ``resume`` with the same token: for output that others have written."""
    return f"::stop-commands::{token}"


def resume(token: str) -> str:
    """See ``stop_commands``."""
    return f"::{token}::"


def _data(text: str) -> str:
    # The percent sign first: it is what the others become.
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
