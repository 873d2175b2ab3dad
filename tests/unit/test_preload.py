"""Which stages are forked from one process, and from which process none may be forked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_remembered import RUN

from stagelaunch.core.preload import Preload, preload_for, unfit


def test_stages_that_import_under_the_same_variables_share_one():
    alike = replace(RUN, env={"X": "1", "CUDA_VISIBLE_DEVICES": "GPU-1"}, engine="a")
    other = replace(RUN, env={"X": "2"}, engine="b")
    runs = (replace(RUN, engine="c"), other, alike)
    assert preload_for(alike, runs) == Preload((("X", "1"),), ("a", "c"), "simulated") == preload_for(runs[0], runs)
    assert preload_for(other, runs) == Preload((("X", "2"),), ("b",), "simulated")


def torch(is_initialised: bool):
    return {"torch": SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: is_initialised))}


@pytest.mark.parametrize(
    ("threads", "files", "modules", "reason"),
    [
        (1, [], {}, None),
        (1, ["/dev/null"], torch(False), None),
        (3, [], {}, "what they import starts threads (2)"),
        (1, ["/dev/null", "/dev/nvidia-uvm"], {}, "what they import opens the driver"),
        (1, [], torch(True), "what they import opens the driver"),
    ],
)
def test_a_process_whose_copy_would_hang_is_not_forked(threads, files, modules, reason):
    assert unfit(threads, files, modules) == reason


def test_what_one_engine_changes_of_the_process_is_not_for_the_others():
    assert unfit(1, [], {}, ["the umask", "it all"]) == "what they import changes the umask and it all"
