"""What several test modules share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports torch: on a shared machine its threads fight, on a few cores they cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny checkpoint (seed 0). Read only: copy it before damaging it."""
    from stagelaunch.weights.synthetic import write_checkpoint

    directory = tmp_path_factory.mktemp("checkpoint") / "qwen3-omni-tiny"
    write_checkpoint(directory)
    return directory
