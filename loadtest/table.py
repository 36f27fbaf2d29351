"""The tables of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from loadtest.figures import ALL, COLUMNS, Column, Slo, Summary

__all__ = ["compared", "group", "note", "table", "versus", "views"]


def views() -> list[tuple[str, list[Column]]]:
    """(title, columns) of the tables that show a run."""
    titles = ((False, "What clients saw"), (True, "What the server says"))
    return [(title, [one for one in COLUMNS if one.said is said]) for said, title in titles]


def table(found: Sequence[Summary], title: str, columns: Sequence[Column]) -> Table:
    """A row each group."""
    grid = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    grid.add_column("class")
    grid.add_column("protocol")
    for column in columns:
        grid.add_column(column.title, justify="left" if column.title in ("errors", "replicas") else "right")
    for one in found:
        grid.add_row(one.workload, one.protocol, *(column.text(one) for column in columns))
    return grid


def compared(names: tuple[str, str], pairs: Sequence[tuple[Summary, Summary]]) -> Table:
    """Two runs side by side: of each group every figure of both, and the second over the first."""
    grid = Table(title="Side by side", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for title in ("class", "protocol", "figure", *names, "ratio"):
        grid.add_column(title, justify="right" if title in (*names, "ratio") else "left")
    for pair in pairs:
        for number, column in enumerate(COLUMNS):
            where = group(pair[0]) if number == 0 else ("", "")
            grid.add_row(*where, column.title, *(column.text(one) for one in pair), versus(column.value, pair))
    return grid


def versus(value: Callable[[Summary], Any], pair: tuple[Summary, Summary]) -> str:
    """The second's figure over the first's; of percentiles each."""
    first, second = value(pair[0]), value(pair[1])
    if isinstance(first, tuple) and isinstance(second, tuple):
        return " / ".join(_ratio(one, other) for one, other in zip(first, second, strict=True))
    if isinstance(first, int | float) and isinstance(second, int | float):
        return _ratio(first, second)
    return ""


def _ratio(first: float, second: float) -> str:
    return f"{second / first:.2f}" if first else "-"


def group(one: Summary) -> tuple[str, str]:
    """The group's name."""
    return one.workload, one.protocol


def note(slo: Slo, overall: Summary) -> str:
    """What the figures mean, below them."""
    assert (overall.workload, overall.protocol) == (ALL, ALL)
    return (
        "Latencies are p50 / p95 / p99. Inter-token: between messages, of which one brings an accepted draft's tokens "
        f"together. Goodput: answers per second with TTFT up to {slo.ttft_ms:g} ms and up to {slo.tpot_ms:g} ms per "
        f"token. Requests left on time: p99 {overall.late_ms:.0f} ms late."
    )
