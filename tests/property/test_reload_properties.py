"""After any change of a file: the parts that need no restart are the new one's, all others the running one's."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stagelaunch.core.config import Deployment
from stagelaunch.core.reload import NEXT_START, reload

NOW = ("timeouts", "on_failure", "restarts", "memory_tolerance_bytes", "logs")
seconds = st.integers(1, 99).map(lambda value: f"{value}s")
sizes = st.integers(1, 9).map(lambda value: f"{value}MiB")


def some(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=parts)


stages = st.builds(
    lambda ids, more: [
        {
            "id": n, "name": f"stage-{n}", "component": "talker", "devices": [0], "max_num_seqs": 1,
            "max_num_batched_tokens": 8, "max_model_len": 8, **more,
        }
        for n in sorted(ids)
    ],
    st.sets(st.integers(0, 3), min_size=1),
    st.fixed_dictionaries({"utilization": st.sampled_from([0.1, 0.2])}, optional={"block_size": st.integers(1, 3)}),
)  # fmt: skip
files = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "b"]),
        "model": st.just("m"),
        "backend": st.just("cuda"),
        "stages": stages,
    },
    optional={
        "timeouts": some(stop=seconds, memory=seconds, heartbeat=seconds, phase=seconds),
        "on_failure": st.sampled_from(["stop-all", "restart-stage", "restart-all"]),
        "restarts": some(max=st.integers(0, 3), within=seconds),
        "memory_tolerance": sizes,
        "logs": some(max_size=sizes, keep=st.integers(0, 3)),
        "order": st.sampled_from(["overlap", "serial"]),
        "reserve": sizes,
        "lock_dir": st.sampled_from(["x", "y"]),
    },
)


@given(files, files)
def test_the_merged_one_has_exactly_the_reloadable_parts_of_the_new_one(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    running, newly_read = Deployment.model_validate(old), Deployment.model_validate(new)
    found = reload(running, newly_read)
    for name in Deployment.model_fields:
        source = newly_read if name in NOW else running
        assert getattr(found.deployment, name) == getattr(source, name), name
    # What is left to say after taking over is what waits for the next start, and that was marked.
    waiting = tuple(line for line in found.lines if line.endswith(NEXT_START))
    again = reload(found.deployment, newly_read).lines
    assert again == (waiting or ("nothing has changed",))
