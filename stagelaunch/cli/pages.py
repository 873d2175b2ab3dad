"""Status and probe answers as text for people. Input is the JSON the control socket gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stagelaunch.core.table import table
from stagelaunch.core.units import format_duration, format_size

TERMS = ("budget", "context", "weights", "activations", "non_torch", "graphs", "margin", "kv")


def render_status(body: dict[str, Any]) -> str:
    """The deployment in one page: phases, the memory ledger of each stage, and of each device."""
    took = "" if body["boot_s"] is None else f", booted in {format_duration(body['boot_s'])}"
    again = [f"{stage['name']} {stage['restarts']}" for stage in body["stages"] if stage["restarts"]]
    took += f"; restarts: {', '.join(again)}" if again else ""
    head = f"{body['name']}: {body['state']} (supervisor pid {body['pid']}{took})"
    blocks = [head, _stages(body["stages"])]
    if any(stage["ledger"] for stage in body["stages"]):
        blocks += [_ledgers(body["stages"]), _sources(body["stages"])]
    return "\n\n".join([*blocks, _devices(body)])


def _stages(stages: list[dict[str, Any]]) -> str:
    rows = [("stage", "pid", "device", "phase", "for", "progress")]
    for stage in stages:
        elapsed = format_duration(stage["phase_elapsed_s"]) if stage["phase"] else ""
        rows.append(
            (stage["name"], str(stage["pid"] or "-"), str(stage["device"]), _phase(stage), elapsed, _progress(stage))
        )  # fmt: skip
    return _page(rows, right=(1, 2, 4))


def _phase(stage: dict[str, Any]) -> str:
    if stage["state"] in ("restarting", "cooling", "admitting"):
        return "restarting"
    return stage["phase"] or "not started"


def _progress(stage: dict[str, Any]) -> str:
    if stage.get("waits_for") is not None:
        return f"waits for the device lock: {'; '.join(stage['waits_for']) or 'nobody on record'}"
    progress = stage.get("progress")
    if not progress or not progress["total"]:
        return ""
    return f"{100 * progress['done'] // progress['total']} % of {_amount(progress)}"


def _amount(progress: dict[str, Any]) -> str:
    return format_size(progress["total"]) if progress["unit"] == "bytes" else f"{progress['total']} {progress['unit']}"


def _ledgers(stages: list[dict[str, Any]]) -> str:
    """Budget minus everything that is used is what becomes KV cache; beside it what the driver says is held."""
    rows = [("memory ledger", *TERMS, "unspent", "held", "KV blocks")]
    for stage in stages:
        ledger = stage["ledger"]
        if ledger is None:
            continue
        sizes = [format_size(ledger["terms"][name]["bytes"]) for name in TERMS]
        blocks = str(ledger["num_blocks"]) if ledger["block_bytes"] else "no KV"
        mark = "" if stage["ledger_is_final"] else " (before capture)"
        held = "-" if ledger["held_bytes"] is None else format_size(ledger["held_bytes"])
        rows.append((stage["name"] + mark, *sizes, _unspent(ledger["unspent_bytes"]), held, blocks))
    return _page(rows, right=range(1, 12))


def _unspent(size_bytes: int) -> str:
    """Below nothing when the graphs took more than estimated: then a part of the margin is used."""
    return format_size(size_bytes) if size_bytes >= 0 else f"0 B ({format_size(-size_bytes)} of the margin used)"


def _sources(stages: list[dict[str, Any]]) -> str:
    """How each term became known, and its other reading where there is one; one line where all stages agree."""
    lines = ["where the terms come from"]
    for name in TERMS:
        sources: dict[str, list[str]] = {}
        for stage in stages:
            if stage["ledger"] is not None:
                term = stage["ledger"]["terms"][name]
                sources.setdefault(f"{term['source']}{_readings(term)}", []).append(stage["name"])
        texts = [text if len(sources) == 1 else f"{text} ({', '.join(who)})" for text, who in sources.items()]
        lines.append(f"  {name:<12} {'; '.join(texts)}")
    return "\n".join(lines)


def _readings(term: dict[str, Any]) -> str:
    if term["low_bytes"] == term["high_bytes"]:
        return ""
    return f", readings {format_size(term['low_bytes'])} to {format_size(term['high_bytes'])}"


def _devices(body: dict[str, Any]) -> str:
    rows = [("device", "total", "free before", "free now", "given to stages", "held by stages", "uuid")]
    for device in body["devices"]:
        here = [stage for stage in body["stages"] if stage["device"] == device["index"]]
        budgets = sum(stage["ledger"]["terms"]["budget"]["bytes"] for stage in here if stage["ledger"])
        pids = {stage["pid"] for stage in here}
        held = [process["size_bytes"] for process in device["processes"] if process["pid"] in pids]
        known = [size for size in held if size is not None]
        rows.append(
            (str(device["index"]), format_size(device["total_bytes"]), format_size(device["free_before_bytes"]),
             format_size(device["free_bytes"]), format_size(budgets) if budgets else "-",
             format_size(sum(known)) if known else "-", device["uuid"])
        )  # fmt: skip
    return _page(rows, right=range(6))


def render_probes(results: list[dict[str, Any]]) -> str:
    """One line per probed stage."""
    rows = [("stage", "batch", "output", "took", "graph against eager")]
    for result in results:
        if result.get("error"):
            rows.append((result["stage"], "-", "-", "-", f"FAILED: {result['error']}"))
            continue
        verdict = "no graph captured" if not result["through_graph"] else _difference(result["max_abs_diff"])
        shape = "x".join(map(str, result["output_shape"]))
        rows.append((result["stage"], str(result["batch_size"]), shape, format_duration(result["elapsed_s"]), verdict))
    return _page(rows, right=(1, 3))


def _difference(max_abs_diff: float) -> str:
    return "identical" if max_abs_diff == 0 else f"differs by up to {max_abs_diff:.3g}"


def _page(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    return "\n".join(table(rows, right=right))
