"""The result as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from dsde.bench.cell import Cell, Result, geometric_mean
from dsde.bench.contender import AUTOREGRESSIVE
from dsde.bench.trail import SIGNALS, Trails, acceptance, spearman

__all__ = ["cells_table", "number", "signals_table", "summary_table"]


def cells_table(results: Sequence[Result], best: Mapping[Cell, str], draft: str, temperature: float) -> Table:
    """Policies against batch sizes for one draft and temperature; several workloads come as their geometric mean.

    An entry: tokens per second, its ratio to no speculation, its ratio to the best fixed length. A star marks that
    length; with several workloads each may have its own.
    """
    chosen = [one for one in results if one.cell.draft == draft and one.cell.scene.temperature == temperature]
    workloads = list(dict.fromkeys(one.cell.scene.workload for one in chosen))
    what = workloads[0] if len(workloads) == 1 else f"geometric mean of {len(workloads)} workloads"
    table = Table(title=f"{draft} draft, temperature {temperature:g}, {what}", title_justify="left")
    table.add_column("policy", no_wrap=True)
    batches = list(dict.fromkeys(one.cell.scene.batch for one in chosen))
    for batch in batches:
        table.add_column(f"batch {batch}\ntokens/s  x none  x best K", justify="right", no_wrap=True)
    for policy in dict.fromkeys(one.policy for one in chosen):
        own = {batch: [o for o in chosen if o.policy == policy and o.cell.scene.batch == batch] for batch in batches}
        table.add_row(policy, *(_entry(own[batch], best) for batch in batches))
    return table


def summary_table(results: Sequence[Result]) -> Table:
    """Every policy over all its cells: geometric mean and worst cell of both ratios, and what became of its drafts."""
    table = Table(title="all cells", title_justify="left")
    for name in ("policy", "x none", "worst", "x best K", "worst", "tokens/step", "accepted", "wasted"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for policy in dict.fromkeys(one.policy for one in results):
        own = [one for one in results if one.policy == policy]
        none = [one.ratio_to_autoregressive for one in own if one.ratio_to_autoregressive is not None]
        fixed = [one.ratio_to_static_opt for one in own if one.ratio_to_static_opt is not None]
        table.add_row(
            policy,
            *(number(value) for value in (geometric_mean(none), min(none, default=None))),
            *(number(value) for value in (geometric_mean(fixed), min(fixed, default=None))),
            number(sum(one.mean_acceptance_length for one in own) / len(own)),
            _mean(one.acceptance_rate for one in own),
            _mean(one.wasted_draft_share for one in own),
        )
    return table


def _entry(results: Sequence[Result], best: Mapping[Cell, str]) -> str:
    if not results:
        return "-"
    star = "*" if any(best.get(one.cell) == one.policy for one in results) else " "
    speed = geometric_mean(one.tokens_per_s for one in results)
    none = geometric_mean(one.ratio_to_autoregressive for one in results if one.ratio_to_autoregressive is not None)
    fixed = geometric_mean(one.ratio_to_static_opt for one in results if one.ratio_to_static_opt is not None)
    none = None if results[0].policy == AUTOREGRESSIVE else none
    return f"{speed:6.1f}  {number(none):>6}  {number(fixed):>7}{star}"


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(sum(known) / len(known) if known else None)


def number(value: float | None) -> str:
    """Three digits after the point, a dash for None."""
    return "-" if value is None else f"{value:.3f}"


def signals_table(trails: Trails) -> Table:
    """Rank correlation of each signal with the acceptance of the step that follows it, per draft and temperature."""
    table = Table(title="signals against the next step's acceptance (Spearman)", title_justify="left")
    table.add_column("draft, temperature", no_wrap=True)
    for signal in SIGNALS:
        table.add_column(signal, justify="right")
    table.add_column("steps", justify="right")
    for (draft, temperature), own in trails.observed().items():
        pairs = acceptance(own)
        figures = [spearman(*pairs[signal]) for signal in SIGNALS]
        entries = ("-" if figure is None else f"{figure:+.2f}" for figure in figures)
        table.add_row(f"{draft}, {temperature:g}", *entries, str(max(len(values) for values, _ in pairs.values())))
    return table
