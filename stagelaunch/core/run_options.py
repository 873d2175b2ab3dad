"""What the command line and the service manager decide about one run of a deployment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceLink:
    """Where a service manager listens, and within which time it wants to hear that we are alive.

    Taken out of the environment, so that no stage can speak for the deployment.
    """

    address: str | None = None
    watchdog_s: float | None = None


NO_SERVICE = ServiceLink()


@dataclass(frozen=True)
class RunOptions:
    """How a deployment is run, beside what its config says."""

    wait_for_memory_s: float | None = None
    """How long to wait until it fits; None: not at all."""
    ci: bool = False
    """A stop takes 4 s in all, whatever the config says."""
    quiet: bool = False
    """What the stages write to their logs is not shown."""
    service: ServiceLink = NO_SERVICE
    reuse_plan: bool = False
    """Stages boot by what an earlier boot of the same plan has measured."""
