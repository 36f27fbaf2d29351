"""The pictures of a benchmark, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from dsde.bench.cell import Cell, Result, geometric_mean
from dsde.bench.contender import AUTOREGRESSIVE
from dsde.bench.trail import SIGNALS, Trail, Trails, acceptance, spearman

mpl.use("agg")

from matplotlib import pyplot

__all__ = ["draw", "save"]

BINS = 10
# Requests drawn one by one; more would hide each other.
DRAWN_REQUESTS = 4


def draw(directory: Path, results: Sequence[Result], trails: Trails) -> list[Path]:
    """Draw all there is data for into `directory`, made where it does not exist; the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    groups = dict.fromkeys((one.cell.draft, one.cell.scene.temperature) for one in results)
    for draft, temperature in groups:
        name = f"{draft}-T{temperature:g}"
        own = [one for one in results if (one.cell.draft, one.cell.scene.temperature) == (draft, temperature)]
        fixed_size = [one for one in own if len(one.cell.scene.load) == 1]
        if fixed_size:
            figure = _scaling(fixed_size, f"{draft} draft, temperature {temperature:g}")
            files += save(figure, directory / f"batch-{name}")
        if steps := trails.observed().get((draft, temperature)):
            figure = _signals(steps, f"{draft} draft, temperature {temperature:g}")
            files += save(figure, directory / f"acceptance-{name}")
    for cell in trails.cells:
        scene = cell.scene
        name = f"lengths-{cell.draft}-T{scene.temperature:g}-{scene.workload}-b{scene.batch}"
        adaptive = {label: trail for label, trail in trails.of(cell).items() if not label.startswith("static-")}
        if adaptive:
            files += save(_lengths(adaptive, cell), directory / name)
    return files


def _scaling(results: Sequence[Result], title: str) -> Any:
    """Throughput, its ratio to no speculation and latency against the batch size."""
    figure, (speed, ratio, latency) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    batches = sorted({one.cell.scene.load[0] for one in results})
    policies = list(dict.fromkeys(one.policy for one in results))
    fixed = [policy for policy in policies if policy.startswith("static-")]
    greys = pyplot.get_cmap("Greys")(np.linspace(0.35, 0.75, max(1, len(fixed))))
    for policy in policies:
        cells = {
            batch: [one for one in results if one.policy == policy and one.cell.scene.load[0] == batch]
            for batch in batches
        }
        x = [batch for batch in batches if cells[batch]]
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "label": policy}
        if policy in fixed:
            style |= {"color": greys[fixed.index(policy)], "linewidth": 0.8, "markersize": 2}
        elif policy == AUTOREGRESSIVE:
            style |= {"color": "black", "linestyle": "--"}
        speed.plot(x, [geometric_mean(one.tokens_per_s for one in cells[b]) for b in x], **style)
        ratio.plot(x, [geometric_mean(one.ratio_to_autoregressive or 1.0 for one in cells[b]) for b in x], **style)
        latency.plot(x, [geometric_mean(one.mean_latency_s for one in cells[b]) for b in x], **style)
    for axes, label in ((speed, "tokens/s"), (ratio, "throughput / no speculation"), (latency, "mean latency (s)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("batch size")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    ratio.axhline(1.0, color="black", linewidth=0.6)
    figure.legend(*speed.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(title)
    return figure


def _signals(trails: Sequence[Trail], title: str) -> Any:
    """Accepted share against each signal, in ten bins of equal count, with the middle half of each bin."""
    figure, axes = pyplot.subplots(1, len(SIGNALS), figsize=(4 * len(SIGNALS), 4), sharey=True, layout="constrained")
    for panel, (signal, (values, shares)) in zip(axes, acceptance(trails).items(), strict=True):
        panel.set_xlabel(SIGNALS[signal])
        panel.grid(alpha=0.3)
        correlation = spearman(values, shares)
        if correlation is None:
            panel.set_title("not measured")
            continue
        order = np.argsort(values, kind="stable")
        parts = [part for part in np.array_split(order, BINS) if len(part)]
        centres = [float(np.median(values[part])) for part in parts]
        panel.plot(centres, [float(shares[part].mean()) for part in parts], marker="o")
        low, high = ([float(np.quantile(shares[part], q)) for part in parts] for q in (0.25, 0.75))
        panel.fill_between(centres, low, high, alpha=0.2)
        panel.set_title(f"Spearman {correlation:+.2f}, {len(values)} steps", fontsize=10)
        panel.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("accepted share of the step's drafts")
    figure.suptitle(title)
    return figure


def _lengths(trails: dict[str, Trail], cell: Cell) -> Any:
    """Speculation length step by step: the batch's mean, its longest, and some requests."""
    figure, axes = pyplot.subplots(
        len(trails), 1, figsize=(10, 2.2 * len(trails)), sharex=True, squeeze=False, layout="constrained"
    )
    for panel, (label, trail) in zip(axes[:, 0], trails.items(), strict=True):
        lengths = trail.lengths()
        ids = list(dict.fromkeys(request for observation, _ in trail.steps for request in observation.request_ids))
        for request in ids[:DRAWN_REQUESTS] if len(ids) > 1 else ():
            steps = [
                (step, row[observation.request_ids.index(request)])
                for step, ((observation, _), row) in enumerate(zip(trail.steps, lengths, strict=True))
                if request in observation.request_ids
            ]
            panel.step(*zip(*steps, strict=True), where="mid", linewidth=0.7, alpha=0.5)
        panel.plot([max(row, default=0) for row in lengths], color="grey", linewidth=0.8, label="longest")
        panel.plot([sum(row) / len(row) if row else 0.0 for row in lengths], color="black", label="mean")
        panel.set_ylabel(f"{label}\nSL (tokens)")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8, loc="upper right")
    axes[-1, 0].set_xlabel("verification step")
    scene = cell.scene
    figure.suptitle(f"{cell.draft} draft, batch {scene.batch}, temperature {scene.temperature:g}, {scene.workload}")
    return figure


def save(figure: Any, stem: Path) -> list[Path]:
    """Write stem.png and stem.svg, and close the figure."""
    # with_suffix would cut a temperature such as 0.5.
    files = [stem.parent / f"{stem.name}.{kind}" for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return files
