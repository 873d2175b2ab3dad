"""Run an init function for each stage, all or none: the thread driver of `core.launch`, for library users.

Decides nothing (`core.launch.step` does) and starts no process (the supervisor does).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from stagelaunch.core.errors import ExitCode, StagelaunchError
from stagelaunch.core.groups import init_groups
from stagelaunch.core.launch import (
    AskStage,
    Begin,
    Command,
    Event,
    Failure,
    Finished,
    LaunchPolicy,
    OnFailure,
    Order,
    StageEnded,
    StageReady,
    StartStage,
    StopRequested,
    initial_state,
    step,
)

InitFn = Callable[[int], Any]
CleanupFn = Callable[[int, Any], object]

_MOST_THREADS = 256
"""Without a limit from the caller: far above any real number of groups, far below what a machine can bear."""

_LOOK_UP_S = 0.05
"""How often the waiting caller looks whether it was interrupted."""


class InitError(StagelaunchError):
    """A stage could not be initialised; every stage that had succeeded was cleaned up. Raised from the cause."""

    exit_code: ClassVar[ExitCode] = ExitCode.STAGE_FAILED

    def __init__(
        self,
        stage_id: int,
        cause: BaseException,
        consequences: tuple[Failure, ...] = (),
        cleanup_errors: tuple[Failure, ...] = (),
    ) -> None:
        self.stage_id = stage_id
        self.cause = cause
        self.consequences = consequences
        """Failures of other stages that were running when this one failed."""
        self.cleanup_errors = cleanup_errors
        """What `cleanup_fn` raised, and for which stage."""
        super().__init__(stage_id, cause, consequences, cleanup_errors)

    def __str__(self) -> str:
        lines = [f"cannot initialise stage {self.stage_id}: {self.cause!r}; see the cause for what to change"]
        lines += [f"also failed: stage {late.stage_id}: {late.cause!r}" for late in self.consequences]
        lines += [f"not cleaned up: stage {left.stage_id}: {left.cause!r}" for left in self.cleanup_errors]
        return "\n".join(lines)


def run_init(
    stage_devices: Mapping[int, Collection[int]],
    init_fn: InitFn,
    cleanup_fn: CleanupFn,
    *,
    max_workers: int | None = None,
) -> dict[int, Any]:
    """Every stage initialised and its result by stage id, or none: what had succeeded is cleaned up.

    Groups of stages that share devices run in threads, at most ``max_workers`` at a time (None: all); inside
    a group strictly by stage id. After the first failure, of any kind, no ``init_fn`` is called any more;
    running ones finish; when their threads have ended, ``cleanup_fn(stage, result)`` is called exactly once
    for each stage that succeeded, in a group the last one first. Then InitError, from the cause.

    Ctrl-C in the calling thread, also while rolling back, does the same and is raised again once nothing is
    left, from the InitError if a stage had failed too. ``init_fn`` is waited for without a limit: nothing can
    end a thread from outside.
    """
    if max_workers is not None and max_workers < 1:
        raise ValueError(f"cannot run stages with max_workers={max_workers}; give at least 1, or None")
    groups = tuple(map(tuple, init_groups(stage_devices)))
    policy = LaunchPolicy(groups, Order.SERIAL, max_workers or _MOST_THREADS, OnFailure.DRAIN)
    driver = _ThreadDriver(policy, init_fn, cleanup_fn)
    interrupt = driver.run()
    error = driver.init_error()
    if interrupt is not None:
        for left in driver.cleanup_errors():
            interrupt.add_note(f"not cleaned up: stage {left.stage_id}: {left.cause!r}")
        raise interrupt from error
    if error is not None:
        raise error from error.cause
    return dict(sorted(driver.results.items()))


@dataclass(frozen=True)
class _InitDone:
    """What a worker thread reports: the last thing it does."""

    stage_id: int
    result: Any
    error: BaseException | None


class _ThreadDriver:
    """Performs the commands of one launch.

    The loop runs in a thread of its own, the coordinator, because Ctrl-C is raised between any two bytecodes of
    the main thread: a loop in the calling thread would now and then lose the event it had just taken, and with
    it a clean-up. The calling thread only waits, and turns an interrupt into one more event.
    """

    def __init__(self, policy: LaunchPolicy, init_fn: InitFn, cleanup_fn: CleanupFn) -> None:
        self.results: dict[int, Any] = {}
        self._init_fn = init_fn
        self._cleanup_fn = cleanup_fn
        self._state = initial_state(policy)
        self._inbox: SimpleQueue[Event | _InitDone] = SimpleQueue()
        self._inbox.put(Begin(time.monotonic()))
        self._turn = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._cleaned: set[int] = set()
        self._crash: BaseException | None = None
        self._coordinator: threading.Thread | None = None
        self._started = self._returned = 0
        self._bell: SimpleQueue[None] = SimpleQueue()

    def run(self) -> BaseException | None:
        """Returns when every stage is ready or nothing is left; what interrupted the caller, if anything did."""
        interrupt: BaseException | None = None
        try:
            while True:
                try:
                    self._await_coordinator()
                    if self._is_settled(interrupt):
                        break
                    self._start_coordinator()
                except BaseException as error:
                    self._inbox.put(StopRequested(error, time.monotonic()))
                    interrupt = error if interrupt is None else interrupt
        finally:
            # A second Ctrl-C can strike while the first is being handled and end the wait; the coordinator then
            # rolls back without us. If all is settled, nobody reads this.
            self._inbox.put(StopRequested("the caller has left", time.monotonic()))
        if self._crash is not None:
            raise self._crash
        return interrupt

    def _is_settled(self, interrupt: BaseException | None) -> bool:
        ready = self._state.is_ready and interrupt is None
        return ready or self._state.is_finished or self._crash is not None

    def _start_coordinator(self) -> None:
        coordinator = threading.Thread(target=self._coordinate, name="run_init")
        try:
            coordinator.start()
        except RuntimeError:  # no thread to be had: the caller's will do
            self._coordinate()
        else:
            self._coordinator = coordinator
            self._started += 1

    def _await_coordinator(self) -> None:
        # Not by join: interrupted, CPython 3.11's takes a thread that runs for one that has ended.
        while self._returned < self._started:
            with suppress(Empty):
                # Not for ever: a signal that another thread received does not wake this one.
                self._bell.get(timeout=_LOOK_UP_S)
        if self._coordinator is not None:
            self._coordinator.join()  # it has rung; this leaves no thread behind

    def _coordinate(self) -> None:
        # A caller interrupted when every stage was ready, or in the middle of starting us, starts another
        # coordinator: that one waits here for the one before it, if there is one.
        with self._turn:
            try:
                self._loop()
            except BaseException as error:
                self._crash = error
            self._returned += 1
        self._bell.put(None)

    def _loop(self) -> None:
        while not self._state.is_finished and self._crash is None:
            for message in self._receive():
                self._take(message)
            if self._state.is_ready:
                return

    def _receive(self) -> list[Event | _InitDone]:
        """All that is known by now, bad news first: nothing may start that a failure already in here forbids."""
        messages = [self._inbox.get()]
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return sorted(messages, key=_is_good_news)

    def _take(self, message: Event | _InitDone) -> None:
        event = self._settle_init(message) if isinstance(message, _InitDone) else message
        self._state, commands = step(self._state, event)
        for command in commands:
            self._perform(command)

    def _settle_init(self, done: _InitDone) -> Event:
        # Clean-up waits for threads that have ended, not only for functions that have returned.
        self._threads.pop(done.stage_id).join()
        at_s = time.monotonic()
        if done.error is not None:
            return StageEnded(done.stage_id, Failure(done.stage_id, done.error, at_s), at_s)
        self.results[done.stage_id] = done.result
        return StageReady(done.stage_id, at_s)

    def _perform(self, command: Command) -> None:
        match command:
            case StartStage(stage_id):
                self._start(stage_id)
            case AskStage(stage_id):
                self._clean_up(stage_id)
            case Finished():
                pass  # the state says so too
            case _:
                raise AssertionError(f"a launch that drains has no use for {command}")

    def _start(self, stage_id: int) -> None:
        self._threads[stage_id] = thread = threading.Thread(
            target=self._init, args=(stage_id,), name=f"init-stage-{stage_id}"
        )
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had
            del self._threads[stage_id]
            at_s = time.monotonic()
            self._inbox.put(StageEnded(stage_id, Failure(stage_id, error, at_s), at_s))

    def _init(self, stage_id: int) -> None:
        try:
            done = _InitDone(stage_id, self._init_fn(stage_id), None)
        except BaseException as error:
            done = _InitDone(stage_id, None, error)
        self._inbox.put(done)

    def _clean_up(self, stage_id: int) -> None:
        failure = None
        try:
            # Popped: the InitError's traceback leads here, and must not keep a device's memory alive.
            self._cleaned.add(stage_id)
            self._cleanup_fn(stage_id, self.results.pop(stage_id))
        except BaseException as error:
            failure = Failure(stage_id, error, time.monotonic())
        self._inbox.put(StageEnded(stage_id, failure, time.monotonic()))

    def init_error(self) -> InitError | None:
        """The first failure of a stage with all that came of it; None if no stage failed."""
        match self._state.first_failure:
            case Failure(int(stage_id), BaseException() as cause):
                late = [kept for kept in self._state.consequences if kept.stage_id not in self._cleaned]
                error = InitError(stage_id, cause, tuple(late), self.cleanup_errors())
                error.__cause__ = cause
                return error
        return None

    def cleanup_errors(self) -> tuple[Failure, ...]:
        """What `cleanup_fn` raised."""
        return tuple(kept for kept in self._state.consequences if kept.stage_id in self._cleaned)


def _is_good_news(message: Event | _InitDone) -> bool:
    match message:
        case _InitDone():
            return message.error is None
        case StopRequested() | StageEnded():
            return False
    return True
