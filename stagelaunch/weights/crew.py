"""A few threads that do one list of jobs in order, and hand each result to the thread that called them.

The first error ends all of it; when it is left every thread has ended. Used by the reader only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


class Crew(Generic[Job, Result]):
    """``count`` threads, or as many as can be had, that take the next job whenever they are done with one.

    ``do`` runs in them; ``wake`` is called when they are to end, and must make a ``do`` that waits for the caller
    raise or return.
    """

    def __init__(
        self, jobs: Iterable[Job], do: Callable[[Job], Result], count: int, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._jobs = iter(jobs)
        self._do = do
        self._wake = wake
        self._next = threading.Lock()
        self._stop = threading.Event()
        self._done: SimpleQueue[tuple[Result] | BaseException | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"weights-{n}", daemon=True) for n in range(count)]

    @contextmanager
    def at_work(self) -> Iterator[Iterator[Result]]:
        """Results in the order in which they come. What a job raises first is raised here, once."""
        started: list[threading.Thread] = []
        try:
            for thread in self._threads:
                try:
                    thread.start()
                except RuntimeError:
                    # No more threads may be had: fewer are slower, and only without any there is nobody to do it.
                    if not started:
                        raise
                    break
                started.append(thread)
            yield self._results(len(started))
        finally:
            self._stop.set()
            self._wake()
            for thread in started:
                thread.join()

    def _results(self, running: int) -> Iterator[Result]:
        while running:
            match self._done.get():
                case None:
                    running -= 1
                case (result,):
                    yield result
                case error:
                    assert isinstance(error, BaseException)
                    raise error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with self._next:
                    job = next(self._jobs, None)
                if job is None:
                    break
                self._done.put((self._do(job),))
        except BaseException as error:  # carried to the thread that waits for results
            self._done.put(error)
        self._done.put(None)
