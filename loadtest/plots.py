"""The pictures of a report, each an SVG element to stand inside a page."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np

from loadtest.figures import Slo, Summary, summarise
from loadtest.records import Record

mpl.use("agg")

from matplotlib import pyplot

__all__ = ["pictures"]

Runs = Mapping[str, Sequence[Record]]
"""Name of a line -> its records."""

_STYLE = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False}
# Nothing of the file's making: it would only name where matplotlib lives.
_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
MOST_DOTS = 2000
_ANY = Slo(float("inf"), float("inf"))
_SAID: dict[str, Callable[[Summary], float | None]] = {
    "acceptance": lambda one: one.acceptance,
    "speculation length": lambda one: one.speculation_length,
    "KLD (nats)": lambda one: one.kld,
}


def pictures(runs: Runs) -> list[tuple[str, str]]:
    """(caption, SVG) of what there is data for. runs: protocols of one run, or runs that are compared."""
    drawn = [
        ("Requests under way and requests per second, by the time since the start", _timeline),
        ("Time to first token and time between messages: share of them that took at most so long", _distributions),
        ("Time to first token of each request, by its start; crosses are requests that failed", _dots),
        ("By class: end to end time (p50, and a line to p95), acceptance, speculation length, KLD", _classes),
    ]
    found = []
    with mpl.rc_context({**_STYLE, "axes.spines.right": False}):
        for number, (caption, draw) in enumerate(drawn):
            figure = draw(runs)
            # Ids of one picture must not meet those of another on the same page.
            mpl.rcParams["svg.hashsalt"] = f"picture-{number}"
            found.append((caption, _svg(figure)))
    return found


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=_METADATA)
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _timeline(runs: Runs) -> Any:
    figure, (under_way, rate) = pyplot.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
    end_s = max(one.end_s for records in runs.values() for one in records)
    edges = np.linspace(0, max(end_s, 1e-3), 61)
    for name, records in runs.items():
        moments = sorted([(one.started_s, 1) for one in records] + [(one.end_s, -1) for one in records])
        under_way.step(
            [at for at, _ in moments], np.cumsum([change for _, change in moments]), where="post", label=name
        )
        counts, _ = np.histogram([one.started_s for one in records], edges)
        rate.stairs(counts / (edges[1] - edges[0]), edges, label=name)
    under_way.set_ylabel("requests under way")
    rate.set_ylabel("requests/s")
    for axes in (under_way, rate):
        axes.set_xlabel("s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    under_way.legend(frameon=False)
    return figure


def _distributions(runs: Runs) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
    values: list[tuple[str, Callable[[Record], Sequence[float | None]]]] = [
        ("time to first token (ms)", lambda one: [one.ttft_ms]),
        ("between messages (ms)", lambda one: one.gaps_ms),
    ]
    for axes, (label, of) in zip(panels, values, strict=True):
        for name, records in runs.items():
            known = np.sort([value for one in records for value in of(one) if value is not None])
            if len(known):
                # A thousand places draw the same line as a million.
                shares = np.linspace(0, 1, min(len(known), 1000))
                axes.plot(np.quantile(known, shares), shares, label=name)
        axes.set_xlabel(label)
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share")
    if panels[0].lines:
        panels[0].legend(frameon=False)
    return figure


def _dots(runs: Runs) -> Any:
    figure, axes = pyplot.subplots(figsize=(10, 2.6), layout="constrained")
    for name, records in runs.items():
        shown = records[:: max(1, len(records) // MOST_DOTS)]
        known = [(one.started_s, one.ttft_ms) for one in shown if one.ttft_ms is not None and one.error is None]
        dots = axes.plot(*zip(*known, strict=True), "o", markersize=3, alpha=0.6, label=name) if known else None
        failed = [one.started_s for one in records if one.error is not None]
        if failed:
            axes.plot(
                failed, [0] * len(failed), "x", color=dots[0].get_color() if dots else None, label=f"{name}, failed"
            )
    axes.set_xlabel("s")
    axes.set_ylabel("TTFT (ms)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    return figure


def _classes(runs: Runs) -> Any:
    figure, panels = pyplot.subplots(1, 4, figsize=(10, 3.0), sharey=True, layout="constrained")
    workloads = sorted({one.workload for records in runs.values() for one in records}, reverse=True)
    height = 0.8 / len(runs)
    for number, (name, records) in enumerate(runs.items()):
        places = np.arange(len(workloads)) + (number - (len(runs) - 1) / 2) * -height
        groups = [[one for one in records if one.workload == workload] for workload in workloads]
        found = [summarise(group, _ANY) if group else None for group in groups]
        times = [one.e2e_ms if one and one.e2e_ms else (0.0, 0.0, 0.0) for one in found]
        bars = panels[0].barh(places, [one[0] / 1000 for one in times], height, label=name)
        colour = bars.patches[0].get_facecolor()
        panels[0].hlines(places, [one[0] / 1000 for one in times], [one[1] / 1000 for one in times], color=colour)
        for axes, figure_of in zip(panels[1:], _SAID.values(), strict=True):
            axes.barh(places, [(figure_of(one) or 0.0) if one else 0.0 for one in found], height)
    panels[0].set_yticks(np.arange(len(workloads)), workloads)
    for axes, label in zip(panels, ("end to end (s)", *_SAID), strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3, axis="x")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=4, frameon=False)
    return figure
