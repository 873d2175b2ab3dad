"""``plan --explain``: where every byte of each device will go, before anything runs.

Of what is forecast (``core.budgets``): a boot measures all of it anew. ASCII only, for any terminal.
"""

from __future__ import annotations

from collections.abc import Mapping

from stagelaunch.core.ledger import Ledger
from stagelaunch.core.plan import DevicePlan, Plan, StagePlan
from stagelaunch.core.table import table
from stagelaunch.core.units import format_size, format_sizes

_HEAD = (
    "device", "stage", "budget", "context", "weights", "activations", "graphs", "margin", "KV cache", "unspent",
    "KV/token", "blocks", "tokens",
)  # fmt: skip
_TERMS = ("budget", "context", "weights", "activations", "graphs", "margin", "kv")


def render_explanation(plan: Plan) -> str:
    """A row per stage and device with the forecast of its ledger, the rest of each device, then the sources."""
    stages = {stage.stage: stage for stage in plan.stages}
    rows = [row for device in plan.devices for row in _rows(device, stages)]
    lines = ["where every byte goes, by forecast", *table([_HEAD, *rows], right=range(2, 13), indent=2)]
    unknown = [stage for stage in plan.stages if stage.forecast_error]
    lines += [f"  {_rest(device)}" for device in plan.devices if device.verdict.demands]
    lines += [f"  stage {stage.name}: no forecast: {stage.forecast_error}" for stage in unknown]
    return "\n".join([*lines, *_sources(plan)])


def _rows(device: DevicePlan, stages: Mapping[int, StagePlan]) -> list[tuple[str, ...]]:
    """The stages of one device, their sizes in one unit, so that they can be compared and added up."""
    here = [stages[demand.stage_id] for demand in device.verdict.demands]
    # A ledger is of its stage's first device; how ranks share its need on others is not known.
    ledgers = {
        stage.stage: stage.forecast
        for stage in here
        if stage.forecast is not None and device.verdict.device == stage.devices[0]
    }
    sizes = iter(format_sizes(size for ledger in ledgers.values() for size in _sizes(ledger)))
    columns = {stage: [next(sizes) for _ in _sizes(ledger)] for stage, ledger in ledgers.items()}
    return [
        (
            str(device.verdict.device),
            f"{stage.stage} {stage.name}",
            *(columns[stage.stage] if stage.stage in columns else ["-"] * (len(_TERMS) + 1)),
            *(_kv(stage, ledgers[stage.stage]) if stage.stage in ledgers else ("-", "-", "-")),
        )
        for stage in here
    ]


def _sizes(ledger: Ledger) -> list[int]:
    return [*(getattr(ledger, term).size_bytes for term in _TERMS), ledger.unspent_bytes]


def _kv(stage: StagePlan, ledger: Ledger) -> tuple[str, str, str]:
    if stage.layout is None:
        return ("no KV", "-", "-")
    # The null block holds no token of anybody.
    tokens = max(ledger.num_blocks - 1, 0) * stage.layout.block_size
    return (f"{stage.layout.bytes_per_token:,} B", f"{ledger.num_blocks:,}", f"{tokens:,}")


def _rest(device: DevicePlan) -> str:
    """What of a device is in nobody's budget."""
    verdict = device.verdict
    if verdict.total_bytes is None:
        return f"device {verdict.device}: not there"
    budgets = sum(demand.budget_bytes or 0 for demand in verdict.demands)
    reserve = f"reserve {len(verdict.demands)} x {format_size(verdict.reserve_bytes)}"
    left_bytes = verdict.total_bytes - (verdict.needed_bytes or 0)
    rest = f"unplanned {format_size(left_bytes)}" if left_bytes >= 0 else f"short by {format_size(-left_bytes)}"
    return (
        f"device {verdict.device}: total {format_size(verdict.total_bytes)}: budgets {format_size(budgets)}, "
        f"{reserve}, {rest}"
    )


def _sources(plan: Plan) -> list[str]:
    """How the figures became known; one line a term, stages named where they differ."""
    known = [(stage.name, stage.forecast) for stage in plan.stages if stage.forecast is not None]
    lines = []
    for term in _TERMS[:-2]:
        sources: dict[str, list[str]] = {}
        for name, ledger in known:
            sources.setdefault(getattr(ledger, term).source, []).append(name)
        texts = [text if len(sources) == 1 else f"{text} ({', '.join(who)})" for text, who in sources.items()]
        lines.append(f"  {term}: {'; '.join(texts)}")
    lines.append("  non-torch: counted with the context; tokens: of all blocks but one, which padding uses")
    return lines if known else []
