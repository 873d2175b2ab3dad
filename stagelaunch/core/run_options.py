"""What the command line and the service manager decide about one run of a deployment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceManager:
    """The service manager's wishes; taken out of the environment, so that no stage can speak for the deployment."""

    notify_socket: str | None = None
    """Where it listens (NOTIFY_SOCKET)."""
    watchdog_usec: int | None = None
    """How often, in microseconds, it wants a sign of life at the least (WATCHDOG_USEC)."""


@dataclass(frozen=True)
class RunOptions:
    """How a deployment is run, beside what its config says."""

    wait_for_memory_s: float | None = None
    """How long to wait until it fits; None: not at all."""
    ci: bool = False
    """A stop takes 4 s in all, whatever the config says."""
    quiet: bool = False
    """What the stages write to their logs is not shown."""
    service_manager: ServiceManager = ServiceManager()
