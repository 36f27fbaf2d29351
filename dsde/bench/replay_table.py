"""Replays as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from dsde.bench.cell import geometric_mean
from dsde.bench.contender import AUTOREGRESSIVE
from dsde.bench.replay_signals import Foresight
from dsde.bench.replays import Replayed
from dsde.bench.table import number
from dsde.bench.trail import SIGNALS
from dsde.bench.workload import MIX

__all__ = ["ablation_table", "correlation_table", "foresight_table", "replay_summary", "replay_table"]


def replay_table(results: Sequence[Replayed], trace: str, cost: str, temperature: float) -> Table:
    """Policies against batch sizes; several workloads come as their geometric mean.

    An entry: tokens per second, its ratio to no speculation, to the best fixed length and to the oracle. A star marks
    that length.
    """
    chosen = [r for r in results if (r.trace, r.cost, r.scene.temperature) == (trace, cost, temperature)]
    workloads = list(dict.fromkeys(one.scene.workload for one in chosen))
    what = workloads[0] if len(workloads) == 1 else f"geometric mean of {len(workloads)} workloads"
    table = Table(title=f"{cost} costs, {trace}, temperature {temperature:g}, {what}", title_justify="left")
    table.add_column("policy", no_wrap=True)
    batches = list(dict.fromkeys(one.scene.batch for one in chosen))
    for batch in batches:
        table.add_column(f"batch {batch}\ntokens/s  x none  x best  oracle", justify="right", no_wrap=True)
    for policy in dict.fromkeys(one.policy for one in chosen):
        own = [one for one in chosen if one.policy == policy]
        table.add_row(policy, *(_entry([one for one in own if one.scene.batch == batch]) for batch in batches))
    return table


def replay_summary(results: Sequence[Replayed]) -> Table:
    """Every policy over all its cells: geometric mean and worst cell of each ratio, and what became of its drafts."""
    table = Table(title="all cells: geometric mean and worst cell", title_justify="left")
    for name in (
        *("policy", "x none", "worst", "x best K", "worst", "x oracle", "worst", "x chances", "worst"),
        *("tokens/step", "accepted", "wasted", "off"),
    ):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for policy in dict.fromkeys(one.policy for one in results):
        own = [one for one in results if one.policy == policy]
        table.add_row(
            policy,
            *_spread(one.ratio_to_autoregressive for one in own),
            *_spread(one.ratio_to_static_opt for one in own),
            *_spread(one.ratio_to_oracle for one in own),
            *_spread(one.ratio_to_oracle_chances for one in own),
            _mean(one.mean_acceptance_length for one in own),
            _mean(one.acceptance_rate for one in own),
            _mean(one.wasted_draft_share for one in own),
            _mean(one.off_share for one in own),
        )
    return table


def correlation_table(found: Sequence[Foresight]) -> Table:
    """Rank correlation of each signal with the acceptance of the step that follows it."""
    table = Table(title="signals against the next step's acceptance (Spearman)", title_justify="left")
    table.add_column("trace, temperature", no_wrap=True)
    table.add_column("workload", no_wrap=True)
    for signal in SIGNALS:
        table.add_column(signal, justify="right")
    table.add_column("steps", justify="right")
    for one in found:
        for workload, row in one.correlations.items():
            entries = ("-" if row[signal] is None else f"{row[signal]:+.2f}" for signal in SIGNALS)
            table.add_row(f"{one.trace}, {one.temperature:g}", workload, *entries, str(one.steps[workload]))
    return table


def foresight_table(found: Sequence[Foresight]) -> Table:
    """How well single signals, and the controller, tell which slots will be accepted; held-out requests."""
    table = Table(title="which slots will be accepted (AUC per slot, held-out requests)", title_justify="left")
    table.add_column("trace, temperature", no_wrap=True)
    table.add_column("workload", no_wrap=True)
    for name in (*SIGNALS, "controller", "ECE", "predicted", "accepted", "slots"):
        table.add_column(name, justify="right")
    for one in found:
        overall = (one.controller_auc, one.calibration_error, one.predicted, one.expected)
        for workload, row in one.auc.items():
            entries = [number(row[signal]) for signal in SIGNALS]
            if workload == MIX:
                entries += [*map(number, overall), str(one.slots)]
            table.add_row(f"{one.trace}, {one.temperature:g}", workload, *entries)
    return table


def ablation_table(found: Sequence[Foresight]) -> Table:
    """What KLD and WVIR add to the other signals."""
    table = Table(title="confidence, entropy and average, with (AUC per slot, held-out requests)", title_justify="left")
    table.add_column("trace, temperature", no_wrap=True)
    for name in ("neither", "KLD", "WVIR", "both", "slots"):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(f"{one.trace}, {one.temperature:g}", *map(number, one.ablation.values()), str(one.ablated))
    return table


def _entry(results: Sequence[Replayed]) -> str:
    if not results:
        return "-"
    star = "*" if any(one.is_static_opt for one in results) else " "
    speed = geometric_mean(one.tokens_per_s for one in results)
    none = _over(one.ratio_to_autoregressive for one in results if one.policy != AUTOREGRESSIVE)
    fixed = _over(one.ratio_to_static_opt for one in results)
    oracle = _over(one.ratio_to_oracle for one in results)
    return f"{speed:7.1f}  {number(none):>6}  {number(fixed):>6}{star} {number(oracle):>6}"


def _spread(values: Iterable[float | None]) -> tuple[str, str]:
    known = [value for value in values if value is not None]
    return number(geometric_mean(known)), number(min(known, default=None))


def _over(values: Iterable[float | None]) -> float | None:
    return geometric_mean(value for value in values if value is not None)


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(sum(known) / len(known) if known else None)
