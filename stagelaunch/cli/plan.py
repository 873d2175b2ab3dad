"""``stagelaunch plan``: what a deployment needs and whether it fits. Creates and changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from stagelaunch.cli.machine import list_claims, list_devices, simulated_machine
from stagelaunch.config_file import LoadedDeployment, load_deployment
from stagelaunch.core.budgets import Forecasts, context_term
from stagelaunch.core.config import Deployment
from stagelaunch.core.config_rules import ENGINE_QWEN3_OMNI
from stagelaunch.core.errors import CheckpointError, UsageError
from stagelaunch.core.explain_text import render_explanation
from stagelaunch.core.identity import DeviceRef, number_refs, read_ref
from stagelaunch.core.plan import Plan, make_plan, make_plan_now, refusal
from stagelaunch.core.plan_json import plan_to_json
from stagelaunch.core.plan_text import render_plan
from stagelaunch.core.units import parse_size


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option(
    "--device-total",
    "device_totals",
    multiple=True,
    metavar="SIZE|DEVICE=SIZE,...",
    help="Plan for devices of this size (80GiB, or 0=80GiB,GPU-8932f937=141GiB) instead of the ones at hand."
    " Repeatable.",
)
@click.option(
    "--explain", is_flag=True, help="Say where every byte will go, by a forecast of some seconds; no GPU needed."
)
def plan(config: Path, as_json: bool, device_totals: tuple[str, ...], explain: bool) -> None:
    """Show what the deployment CONFIG needs and whether it fits.

    Without --device-total the devices of this machine are asked, also for what is free and claimed now.
    """
    loaded = load_deployment(config)
    made, damage = _planned(loaded, device_totals, _forecasts(loaded, explain))
    made = replace(made, damaged=() if damage is None else tuple(map(str, damage.faults)))
    text = render_plan(made, render_explanation(made) if explain else None)
    click.echo(json.dumps(plan_to_json(made), indent=2) if as_json else text)
    if (error := damage or refusal(made)) is not None:
        raise error


def _forecasts(loaded: LoadedDeployment, explain: bool) -> Forecasts:
    """The needs of all stages, or of those whose budget is to be worked out, which no plan can do without."""
    machine = simulated_machine(loaded)
    if not explain and all(stage.demand is not None for stage in loaded.deployment.stages):
        return Forecasts(context_term(None if machine is None else machine.context_bytes))
    # Imported on use: asking takes a process and seconds, and most plans ask nothing.
    from stagelaunch.supervisor.forecast import FORECAST_TIMEOUT_S, ask_needs_sync, forecasts_of, need_requests

    needs = ask_needs_sync(need_requests(loaded, auto_only=not explain), FORECAST_TIMEOUT_S)
    return forecasts_of(needs, machine)


def _planned(
    loaded: LoadedDeployment, device_totals: Sequence[str], forecasts: Forecasts
) -> tuple[Plan, CheckpointError | None]:
    """The plan, and what is wrong with the checkpoint."""
    deployment = loaded.deployment
    if device_totals:
        used = [ref for refs in deployment.stage_refs.values() for ref in refs]
        totals = parse_device_totals(device_totals, used)
        weights, damage = _weights_bytes(loaded)
        return _planned_unseen(deployment, totals, weights, forecasts), damage
    resolved = loaded.resolve(list_devices(loaded), os.environ)
    claims = list_claims(loaded.lock_dir, resolved.devices, simulated_machine(loaded))
    weights, damage = _weights_bytes(loaded)
    return make_plan_now(deployment, resolved, claims, weights, forecasts), damage


def _planned_unseen(
    deployment: Deployment, totals: Mapping[DeviceRef, int], weights: Mapping[int, int], forecasts: Forecasts
) -> Plan:
    """Without a machine to look at, every UUID is a device of its own, as it is written."""
    numbers = number_refs([*(ref for refs in deployment.stage_refs.values() for ref in refs), *totals])
    return make_plan(
        deployment.on_devices(numbers),
        {numbers[ref]: total for ref, total in totals.items()},
        weights,
        forecasts=forecasts,
        uuids={number: ref for ref, number in numbers.items() if isinstance(ref, str)},
    )


def parse_device_totals(texts: Sequence[str], used: Collection[DeviceRef]) -> dict[DeviceRef, int]:
    """Bytes by device number or UUID. A bare size is for every device in ``used``; one with a device overrules it.

    UsageError for what is neither, or gives one device twice.
    """
    common: int | None = None
    single: dict[DeviceRef, int] = {}
    for item in (part.strip() for text in texts for part in text.split(",")):
        device_text, separator, size_text = item.rpartition("=")
        if not separator:
            if common is not None:
                raise _wrong_total(item, "a size for all devices is given twice")
            common = _total(item, size_text)
        elif (device := _device(item, device_text)) in single:
            raise _wrong_total(item, f"device {device} is given twice")
        else:
            single[device] = _total(item, size_text)
    everywhere = {} if common is None else dict.fromkeys(used, common)
    return {**everywhere, **single}


def _device(item: str, text: str) -> DeviceRef:
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    try:
        return read_ref(text)
    except ValueError as error:
        raise _wrong_total(item, str(error)) from None


def _total(item: str, size_text: str) -> int:
    # In a config a bare number is bytes; typed here it is a forgotten unit.
    if size_text.strip().isdecimal():
        raise _wrong_total(item, f"{size_text} has no unit")
    try:
        size_bytes = parse_size(size_text)
    except (ValueError, OverflowError) as error:
        raise _wrong_total(item, str(error)) from None
    if not 0 < size_bytes < 2**53:
        raise _wrong_total(item, "no device has that size")
    return size_bytes


def _wrong_total(item: str, why: str) -> UsageError:
    return UsageError(f"cannot read --device-total {item!r}: {why}; write 80GiB, or 0=80GiB,1=141GiB")


def _weights_bytes(loaded: LoadedDeployment) -> tuple[Mapping[int, int], CheckpointError | None]:
    """Weights by stage id, from the checkpoint's headers; none of a checkpoint that is not there yet, which is noted on
    stderr, or of a damaged one, with what is wrong with it."""
    from stagelaunch.weights.index import read_index

    stages = [stage for stage in loaded.deployment.stages if stage.engine == ENGINE_QWEN3_OMNI]
    if not stages:
        return {}, None
    if _is_not_there_yet(loaded.model_dir):
        click.echo(f"note: planned without weight sizes: no checkpoint in {loaded.model_dir}", err=True)
        return {}, None
    try:
        index = read_index(loaded.model_dir)
    except CheckpointError as error:
        return {}, error
    by_component = index.component_bytes()
    return {stage.id: by_component[stage.component] for stage in stages if stage.component in by_component}, None


def _is_not_there_yet(directory: Path) -> bool:
    try:
        directory.stat()
    except FileNotFoundError:
        return True
    except OSError:
        # A path that no directory can come to have: the reader says what is wrong with it.
        return False
    return False
