"""run_init with real threads, held at events and barriers; nothing here sleeps."""

import _thread
import os
import pickle
import signal
import threading
import weakref
from collections import Counter
from queue import SimpleQueue

import pytest

from stagelaunch.core.launch import Failure, StopRequested
from stagelaunch.init import InitError, run_init

WAIT_S = 20
"""How long a test waits for what must come; a bound, never a delay."""


class Stages:
    """Records what is called; a stage in `failing` raises. Each stage can be held until it is let go."""

    def __init__(self, failing=(), held=(), cleanup_failing=()):
        self.failing = dict(failing)
        self.cleanup_failing = dict(cleanup_failing)
        self.held = {stage: threading.Event() for stage in held}
        self.entered = {stage: threading.Event() for stage in range(20)}
        self.inits, self.ended, self.cleaned = [], [], []

    def init(self, stage):
        self.inits.append(stage)
        self.entered[stage].set()
        if stage in self.held:
            assert self.held[stage].wait(WAIT_S)
        self.ended.append(stage)
        if stage in self.failing:
            raise self.failing[stage]
        return f"result {stage}"

    def cleanup(self, stage, result):
        self.cleaned.append((stage, result))
        if stage in self.cleanup_failing:
            raise self.cleanup_failing[stage]

    def run(self, stage_devices, **more):
        return run_init(stage_devices, self.init, self.cleanup, **more)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def _init_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("init-stage-")}


@pytest.fixture
def tap(monkeypatch):
    """Look at the loop's inbox, or hold it up, from outside."""

    def install(before_get=lambda inbox: None, after_put=lambda message: None):
        class Tapped:
            def __init__(self):
                self._queue = SimpleQueue()
                self.empty, self.gets = self._queue.empty, 0

            def get(self, timeout=None):
                if timeout is not None:  # the caller's bell, not the inbox
                    return self._queue.get(timeout=timeout)
                self.gets += 1
                before_get(self)
                return self._queue.get()

            def put(self, message):
                self._queue.put(message)
                after_put(message)

        monkeypatch.setattr("stagelaunch.init.SimpleQueue", Tapped)

    return install


def test_results_by_stage_and_groups_strictly_by_id():
    stages = Stages()
    assert list(stages.run({3: {0}, 1: {0}, 2: {0}}).items()) == [(s, f"result {s}") for s in (1, 2, 3)]
    assert stages.inits == [1, 2, 3]
    assert stages.cleaned == []


def test_no_stages_give_no_results():
    assert Stages().run({}) == {}


def test_groups_run_at_the_same_time():
    meet = threading.Barrier(24)
    assert len(run_init({s: {s} for s in range(24)}, lambda _: meet.wait(WAIT_S), print)) == 24


def test_at_most_max_workers_groups_run_at_a_time(tap):
    """Looked at whenever the loop has nothing more to do: it has started all it wants, and they are held."""
    running, go = [], threading.Event()

    def look(_inbox):
        running.append(len(_init_threads()))
        if running[-1]:
            go.set()

    tap(before_get=look)
    assert len(run_init({s: {s} for s in range(6)}, lambda _: go.wait(WAIT_S), print, max_workers=2)) == 6
    assert max(running) == 2


@pytest.mark.parametrize("max_workers", [0, -1])
def test_fewer_than_one_worker_is_refused(max_workers):
    stages = Stages()
    with pytest.raises(ValueError, match=f"max_workers={max_workers}; give at least 1"):
        stages.run({0: {0}}, max_workers=max_workers)
    assert stages.inits == []


@pytest.mark.parametrize("cause", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failure_of_any_kind_cleans_up_what_had_succeeded(cause):
    stages = Stages(failing={1: cause})
    with pytest.raises(InitError) as caught:
        stages.run({0: {0}, 1: {0}, 2: {0}})
    assert caught.value.stage_id == 1
    assert caught.value.cause is cause
    assert caught.value.__cause__ is cause
    assert "cannot initialise stage 1" in str(caught.value)
    assert stages.inits == [0, 1]
    assert stages.cleaned == [(0, "result 0")]


def test_a_result_of_none_is_a_success():
    cleaned = []

    def init(stage):
        if stage == 1:
            raise ValueError

    with pytest.raises(InitError):
        run_init({0: {0}, 1: {0}}, init, lambda stage, result: cleaned.append((stage, result)))
    assert cleaned == [(0, None)]


def test_running_stages_finish_and_are_cleaned_up():
    # Stage 0 fails while 2 runs; 2 is let go only when 0's thread is gone, so its failure is known by then.
    stages = Stages(failing={0: ValueError()}, held=(2,))

    def init(stage):
        if stage == 0:
            assert stages.entered[2].wait(WAIT_S)
            failing = threading.current_thread()
            threading.Thread(target=lambda: (failing.join(), stages.held[2].set())).start()
        return stages.init(stage)

    with pytest.raises(InitError) as caught:
        run_init({0: {0}, 1: {0}, 2: {1}, 3: {1}}, init, stages.cleanup)
    assert caught.value.stage_id == 0
    assert sorted(stages.inits) == [0, 2]
    assert stages.cleaned == [(2, "result 2")]


def test_cleanup_waits_for_threads_to_end_not_only_for_functions_to_return(tap, monkeypatch):
    """A thread that has reported lingers until somebody waits for it, or until it is too late."""
    join, noticed, alive = threading.Thread.join, threading.Event(), []

    def joined(thread, timeout=None):
        if thread in _init_threads():
            noticed.set()
        join(thread, timeout)

    def cleanup(stage, result):
        alive.extend(_init_threads())
        noticed.set()

    def linger(message):
        if threading.current_thread() in _init_threads():
            assert noticed.wait(WAIT_S)

    monkeypatch.setattr(threading.Thread, "join", joined)
    tap(after_put=linger)
    with pytest.raises(InitError):
        run_init({0: {0}, 1: {1}}, {0: 0}.__getitem__, cleanup)
    assert alive == []


def test_a_failure_that_is_known_forbids_a_start_that_an_earlier_success_would_allow(tap):
    first, both = threading.Event(), threading.Event()

    def put(message):
        if threading.current_thread().name == "init-stage-0":
            first.set()
        if threading.current_thread().name == "init-stage-2":
            both.set()

    def hold(inbox):
        if inbox.gets > 1:  # the first is Begin
            assert both.wait(WAIT_S)

    tap(before_get=hold, after_put=put)
    stages = Stages(failing={2: ValueError()})

    def init(stage):
        if stage == 2:
            assert first.wait(WAIT_S)
        return stages.init(stage)

    with pytest.raises(InitError):
        run_init({0: {0}, 1: {0}, 2: {1}}, init, stages.cleanup)
    assert sorted(stages.inits) == [0, 2]


def test_two_failures_at_once_are_a_first_and_a_consequence():
    meet = threading.Barrier(3)
    causes = {0: ValueError("zero"), 1: ValueError("one")}

    def init(stage):
        meet.wait(WAIT_S)
        if stage in causes:
            raise causes[stage]

    cleaned = []
    with pytest.raises(InitError) as caught:
        run_init({0: {0}, 1: {1}, 2: {2}}, init, lambda stage, _: cleaned.append(stage))
    first, (late,) = caught.value.stage_id, caught.value.consequences
    assert {first: caught.value.cause, late.stage_id: late.cause} == causes
    assert f"also failed: stage {late.stage_id}" in str(caught.value)
    assert cleaned == [2]


def test_a_cleanup_that_raises_keeps_no_other_from_being_cleaned():
    broken = SystemExit("cannot free")
    stages = Stages(failing={3: ValueError()}, cleanup_failing={1: broken})
    with pytest.raises(InitError) as caught:
        stages.run({0: {0}, 1: {0}, 2: {0}, 3: {0}})
    assert [stage for stage, _ in stages.cleaned] == [2, 1, 0]
    (left,) = caught.value.cleanup_errors
    assert (left.stage_id, left.cause) == (1, broken)
    assert caught.value.consequences == ()
    assert "not cleaned up: stage 1" in str(caught.value)


def test_a_cleaned_up_result_is_not_kept_alive_by_the_error():
    class Tensor:
        pass

    alive = weakref.WeakSet()

    def init(stage):
        if stage == 1:
            raise ValueError
        tensor = Tensor()
        alive.add(tensor)
        return tensor

    with pytest.raises(InitError):
        run_init({0: {0}, 1: {0}}, init, lambda stage, result: None)
    assert len(alive) == 0


def test_the_error_survives_pickling():
    error = InitError(2, ValueError("x"), (Failure(3, KeyError("y"), 1.0),))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.stage_id, str(copy)) == (2, str(error))


def test_when_no_thread_can_be_had_the_stage_fails_and_the_others_are_cleaned_up(monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "init-stage-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    stages = Stages()
    with pytest.raises(InitError, match="can't start new thread"):
        stages.run({0: {0}, 1: {0}})
    assert stages.cleaned == [(0, "result 0")]


def test_when_not_even_the_first_thread_can_be_had_it_ends_with_that(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(InitError, match="can't start new thread"):
        Stages().run({0: {0}})


# Ctrl-C in the calling thread.


@pytest.fixture
def stop_requests(tap):
    """A semaphore with one permit for each stop request that has reached the loop's inbox."""
    arrived = threading.Semaphore(0)
    tap(after_put=lambda message: arrived.release() if isinstance(message, StopRequested) else None)
    return arrived


@pytest.mark.parametrize(
    "ctrl_c",
    [lambda: os.kill(os.getpid(), signal.SIGINT), lambda: signal.raise_signal(signal.SIGINT), _thread.interrupt_main],
    ids=["kill", "raise_signal", "interrupt_main"],
)
def test_ctrl_c_rolls_back_and_is_raised_again(stop_requests, ctrl_c):
    stages = Stages()

    def init(stage):
        if stage == 1:
            ctrl_c()
            assert stop_requests.acquire(timeout=WAIT_S)
        return stages.init(stage)

    with pytest.raises(KeyboardInterrupt) as caught:
        run_init({0: {0}, 1: {0}, 2: {0}}, init, stages.cleanup)
    assert caught.value.__cause__ is None
    assert stages.inits == [0, 1]
    assert stages.cleaned == [(1, "result 1"), (0, "result 0")]


def test_ctrl_c_again_and_again_while_rolling_back_loses_no_cleanup(stop_requests):
    stages = Stages(failing={3: ValueError("three")}, cleanup_failing={1: OSError("left")})

    def cleanup(stage, result):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_requests.acquire(timeout=WAIT_S)
        stages.cleanup(stage, result)

    with pytest.raises(KeyboardInterrupt) as caught:
        run_init({0: {0}, 1: {0}, 2: {0}, 3: {0}}, stages.init, cleanup)
    assert [stage for stage, _ in stages.cleaned] == [2, 1, 0]
    assert isinstance(caught.value.__cause__, InitError)
    assert caught.value.__cause__.stage_id == 3
    assert caught.value.__notes__ == ["not cleaned up: stage 1: OSError('left')"]


def test_a_stage_that_fails_after_ctrl_c_is_named(stop_requests):
    def init(stage):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_requests.acquire(timeout=WAIT_S)
        raise ValueError("late")

    with pytest.raises(KeyboardInterrupt) as caught:
        run_init({4: {0}}, init, print)
    assert caught.value.__cause__.stage_id == 4


@pytest.mark.parametrize("method", ["start", "join"])
def test_an_interrupt_at_the_edges_of_the_wait_rolls_back(monkeypatch, method):
    """When the loop has just been started, and when every stage has just become ready."""
    original, left = getattr(threading.Thread, method), [SystemExit("SIGTERM")]

    def interrupted(thread, *args):
        result = original(thread) if method == "join" else original(thread, *args)
        if thread.name == "run_init" and threading.current_thread() is threading.main_thread() and left:
            raise left.pop()
        return result

    monkeypatch.setattr(threading.Thread, method, interrupted)
    stages = Stages()
    with pytest.raises(SystemExit, match="SIGTERM"):
        stages.run({0: {0}, 1: {0}, 2: {1}})
    assert Counter(stage for stage, _ in stages.cleaned) == Counter(stages.inits)
    if method == "join":
        assert sorted(stages.inits) == [0, 1, 2]
