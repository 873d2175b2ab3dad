"""Every way stagelaunch can refuse or fail: one class per decision a caller can take, with its exit code.

Fields come first and are plain data, so an error survives pickling; the text says what could not be done,
why, and what to change: ``cannot <verb> <object>: <cause>; <what to change>``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What the process tells its caller. 64-78 follow sysexits.h, 124 timeout(1), 130 the shell's Ctrl-C."""

    OK = 0
    STAGE_FAILED = 1
    """A stage failed; everything was cleaned up."""
    DOES_NOT_FIT_NOW = 2
    """The plan fits the devices, but not beside what occupies them or is claimed by others now."""
    USAGE = 64
    NO_DEVICE = 69
    """A device the deployment names is not there, or no driver answers."""
    INTERNAL = 70
    """Our bug."""
    CLEANUP_INCOMPLETE = 71
    """A process or device memory is left; the report names it."""
    TEMPORARY = 75
    """A lock or an admission timed out, or this deployment runs already. Trying later may work."""
    CONFIG = 78
    """Config or checkpoint wrong, an engine that is not installed, or a plan or budget that can never do."""
    BOOT_DEADLINE = 124
    INTERRUPTED = 130


EXIT_CODE_MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.STAGE_FAILED: "a stage failed; clean-up complete",
    ExitCode.DOES_NOT_FIT_NOW: "the plan does not fit now: others hold the memory or have claimed it",
    ExitCode.USAGE: "wrong usage of the command line",
    ExitCode.NO_DEVICE: "no usable device",
    ExitCode.INTERNAL: "internal error: our bug",
    ExitCode.CLEANUP_INCOMPLETE: "clean-up incomplete: a process or device memory is left",
    ExitCode.TEMPORARY: "a lock or the admission timed out, or the deployment is running already",
    ExitCode.CONFIG: "config or checkpoint wrong, an engine not installed, or a plan or budget that can never do",
    ExitCode.BOOT_DEADLINE: "the boot deadline passed",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}


@dataclass(frozen=True)
class Fault:
    """One thing wrong in a file. ``line`` counts from 1; None where the file as a whole is at fault."""

    file: str
    line: int | None
    key: str | None
    text: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.key}: {self.text}" if self.key else f"{place}: {self.text}"


class StagelaunchError(Exception):
    """Base of all errors a user can cause or act on. Its text is one line per finding."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class FileFaultsError(StagelaunchError):
    """A file is wrong; every fault found in it, in one go."""

    exit_code = ExitCode.CONFIG

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        super().__init__(faults)

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


class ConfigError(FileFaultsError):
    """The deployment file is wrong."""


class CheckpointError(FileFaultsError):
    """The model directory is missing, damaged, or another model."""


class FindingsError(StagelaunchError):
    """A plan was refused; one finding per over-full or unknown device."""

    def __init__(self, findings: tuple[str, ...]) -> None:
        self.findings = findings
        super().__init__(findings)

    def __str__(self) -> str:
        return "\n".join(self.findings)


class NeverFitsError(FindingsError):
    """The plan is larger than the devices."""

    exit_code = ExitCode.CONFIG


class DoesNotFitNowError(FindingsError):
    """The plan fits the devices, but other processes hold the memory now, or other deployments have claimed it."""

    exit_code = ExitCode.DOES_NOT_FIT_NOW

    def __init__(self, findings: tuple[str, ...], in_the_way: frozenset[str] = frozenset()) -> None:
        super().__init__(findings)
        self.in_the_way = in_the_way
        """Who holds or claims memory of a device that is short."""
        self.args = (findings, in_the_way)


class AdmissionTimeoutError(FindingsError):
    """The memory did not become free within the time given; the findings are the last ones."""

    exit_code = ExitCode.TEMPORARY


class NoDeviceError(FindingsError):
    """A device is not there, or no driver answers."""

    exit_code = ExitCode.NO_DEVICE


class PlainError(StagelaunchError):
    """An error that is fully said by its text."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return self.text


class LockDirectoryError(PlainError):
    """The lock directory cannot be used. Never worked around with a private one."""

    exit_code = ExitCode.CONFIG


class LockTimeoutError(PlainError):
    """A lock could not be had in time; the text names its holders."""

    exit_code = ExitCode.TEMPORARY


class StartError(PlainError):
    """The machine has no room for one process more."""

    exit_code = ExitCode.TEMPORARY


class AlreadyRunningError(PlainError):
    """This deployment runs already; the text names the process."""

    exit_code = ExitCode.TEMPORARY


class LeftoverError(PlainError):
    """A process that an earlier run has left cannot be killed; the text names it."""

    exit_code = ExitCode.CLEANUP_INCOMPLETE


class TimelineError(PlainError):
    """What should be the timeline of a run is none."""

    exit_code = ExitCode.CONFIG


class NotRunningError(PlainError):
    """The deployment asked for does not run."""

    exit_code = ExitCode.STAGE_FAILED


class ControlError(PlainError):
    """A supervisor is there, but gave no usable answer."""

    exit_code = ExitCode.TEMPORARY


class StageError(PlainError):
    """A stage cannot boot; raised inside a worker, reported by the supervisor."""

    exit_code = ExitCode.STAGE_FAILED
    retry: ClassVar[bool] = False
    """Worth one more try in a fresh process."""


class EngineNotFoundError(StageError):
    """The engine that the config names, or what it imports, is not installed here."""

    exit_code = ExitCode.CONFIG


class BudgetTooSmallError(StageError):
    """The KV cache cannot hold one request of max_model_len; the text names the budget that would do."""

    exit_code = ExitCode.CONFIG


class BudgetOvershootError(StageError):
    """After capture the stage holds more than its budget and would eat its neighbour.

    ``overshoot_bytes``: by how much less KV cache would do; 0 for a stage that has none to cut, so that no retry helps.
    """

    def __init__(self, text: str, overshoot_bytes: int) -> None:
        self.overshoot_bytes = overshoot_bytes
        super().__init__(text)
        self.args = (text, overshoot_bytes)

    @property
    def retry(self) -> bool:  # type: ignore[override]
        """Only with KV cache to cut."""
        return self.overshoot_bytes > 0


class DisturbedError(StageError):
    """Somebody else changed the device while the stage measured, and their memory cannot be told from its own."""

    retry = True


class RememberedPlanError(StageError):
    """What an earlier boot had measured does not hold for this one."""

    retry = True


class UsageError(PlainError):
    """The command line asks for something that does not exist or does not go together."""

    exit_code = ExitCode.USAGE
