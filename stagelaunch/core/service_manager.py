"""What the service manager that started the deployment wants to hear from it. Not how it is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceManager:
    """The service manager's wishes; taken out of the environment, so that no stage can speak for the deployment."""

    notify_socket: str | None
    """Where it listens (NOTIFY_SOCKET)."""
    watchdog_usec: int | None
    """How often, in microseconds, it wants a sign of life at the least (WATCHDOG_USEC)."""
