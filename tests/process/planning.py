"""What planning a stage costs among 1,000 and among 100,000: the same, when everything before a spawn is linear.

A program for ``scripts/bench plan``. Pure decisions on made-up stages, three to a device, some of them over two, so
that groups are chains; half of them with budgets to be worked out. No file is read, no device is asked.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from stagelaunch.core.admission import admission_check
from stagelaunch.core.budgets import Forecasts
from stagelaunch.core.config import Deployment
from stagelaunch.core.groups import init_groups
from stagelaunch.core.ledger import KVLayout, Source, Term
from stagelaunch.core.need import StageNeed
from stagelaunch.core.plan import make_plan
from stagelaunch.core.plan_json import plan_to_json
from stagelaunch.core.plan_text import render_plan
from stagelaunch.core.units import GIB, MIB

FEW, MANY = 1_000, 100_000
RESERVE_BYTES = 16 * MIB


def deployment_of(count: int) -> Deployment:
    """Made without a file, which may not be so large."""
    known = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    stage = {"id": 0, "name": "stage0", "component": "talker", "devices": [0], "budget": "auto", **known}
    one = Deployment.model_validate(
        {
            "name": "many",
            "model": "model",
            "backend": "simulated",
            "reserve": RESERVE_BYTES,
            "simulated": {"devices": {0: "1GiB"}},
            "stages": [stage],
        }
    )
    stages = tuple(one.stages[0].model_copy(update=_differences(number)) for number in range(count))
    return one.model_copy(update={"stages": stages})


def _differences(number: int) -> dict[str, Any]:
    device = number // 2
    if number % 2:
        return {"id": number, "name": f"stage{number}", "devices": (device,)}
    # Chains of ten devices.
    devices = (device, device + 1) if number % 20 != 18 else (device,)
    return {"id": number, "name": f"stage{number}", "devices": devices, "budget": None, "utilization": 0.25}


def steps_of(count: int) -> dict[str, Callable[[], object]]:
    """Everything that is decided before a process starts, by what it is called."""
    deployment = deployment_of(count)
    totals = dict.fromkeys(range(count // 2 + 2), GIB)
    need = StageNeed(8 * MIB, MIB, MIB, KVLayout(2, 2, 64, 4, 16))
    forecasts = Forecasts(Term(64 * MIB, Source.CONFIG), dict.fromkeys(range(count), need))
    shares = {stage.id: (stage.device_indices, 0.25) for stage in deployment.stages}
    weights = dict.fromkeys(range(count), 8 * MIB)

    def plan() -> object:
        return make_plan(deployment, totals, weights, forecasts=forecasts, free_bytes=totals)

    made = make_plan(deployment, totals, weights, forecasts=forecasts, free_bytes=totals)
    assert made.fits, made.findings[:3]
    return {
        "grouped": lambda: init_groups(deployment.stage_devices),
        "admitted": lambda: admission_check(shares, totals, RESERVE_BYTES),
        "planned": plan,
        "budgets worked out": lambda: [made.auto_budget_bytes(stage) for stage in deployment.stages],
        "printed": lambda: render_plan(made),
        "as JSON": lambda: plan_to_json(made),
    }


def timed(step: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, for each step, how much longer a stage takes among many than among few."""
    parser = argparse.ArgumentParser(prog="scripts/bench plan", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    few, many = steps_of(FEW), steps_of(MANY)
    # What the bench itself holds is no part of any step's garbage.
    gc.collect()
    gc.freeze()
    print(
        f"scripts/bench plan --rounds {args.rounds}: us a stage, min median max among {FEW:,} stages, then {MANY:,}; "
        "ratio 1 is linear, 100 quadratic"
    )
    for name in few:
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds):
            # As many stages in all, so that both meet the same machine for about as long.
            found[0].append(statistics.median(timed(few[name]) for _ in range(9)) / FEW)
            found[1].append(timed(many[name]) / MANY)
        ratio = statistics.median(found[1]) / statistics.median(found[0])
        spread = "  ".join(" ".join(f"{t * 1e6:.2f}" for t in (min(v), statistics.median(v), max(v))) for v in found)
        print(f"{name:<20} ratio {ratio:5.2f}   {spread}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
