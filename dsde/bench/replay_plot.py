"""The pictures of a replay, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsde.bench.cell import geometric_mean
from dsde.bench.contender import AUTOREGRESSIVE
from dsde.bench.plot import save
from dsde.bench.replay_signals import Foresight
from dsde.bench.replays import ORACLES, Replayed

# After plot, which chooses a backend without a display.
from matplotlib import pyplot  # isort: skip

__all__ = ["draw"]


def draw(directory: Path, results: Sequence[Replayed], foresights: Sequence[Foresight]) -> list[Path]:
    """Draw all there is data for into `directory`, made where it does not exist; the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for trace, temperature in dict.fromkeys((one.trace, one.scene.temperature) for one in results):
        own = [
            one
            for one in results
            if (one.trace, one.scene.temperature) == (trace, temperature) and len(one.scene.load) == 1
        ]
        if own:
            figure = _scaling(own, f"{trace}, temperature {temperature:g}, replayed")
            files += save(figure, directory / f"replay-{Path(trace).name}-T{temperature:g}")
    if foresights:
        files += save(_calibration(foresights), directory / "calibration")
    return files


def _scaling(results: Sequence[Replayed], title: str) -> Any:
    """Throughput against plain decoding over the batch size, a panel for each cost model."""
    costs = list(dict.fromkeys(one.cost for one in results))
    figure, axes = pyplot.subplots(
        1, len(costs), figsize=(5 * len(costs) + 2, 4.5), squeeze=False, layout="constrained"
    )
    policies = list(dict.fromkeys(one.policy for one in results))
    fixed = [policy for policy in policies if policy.startswith("static-")]
    greys = pyplot.get_cmap("Greys")(np.linspace(0.35, 0.75, max(1, len(fixed))))
    for panel, cost in zip(axes[0], costs, strict=True):
        batches = sorted({one.scene.load[0] for one in results})
        for policy in policies:
            cells = {
                b: [r for r in results if (r.policy, r.cost, r.scene.load[0]) == (policy, cost, b)] for b in batches
            }
            x = [batch for batch in batches if cells[batch]]
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "label": policy}
            if policy in fixed:
                style |= {"color": greys[fixed.index(policy)], "linewidth": 0.8, "markersize": 2}
            elif policy == AUTOREGRESSIVE:
                style |= {"color": "black", "linewidth": 0.6, "marker": ""}
            elif policy in ORACLES:
                line = "--" if policy == next(iter(ORACLES)) else ":"
                style |= {"color": "black", "linestyle": line, "marker": ""}
            panel.plot(x, [geometric_mean(one.ratio_to_autoregressive for one in cells[b]) for b in x], **style)
        panel.set_title(f"{cost} costs", fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set_xlabel("batch size")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("throughput / no speculation")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(title)
    return figure


def _calibration(foresights: Sequence[Foresight]) -> Any:
    """Predicted against seen acceptance of held-out slots."""
    figure, panel = pyplot.subplots(figsize=(5.5, 5), layout="constrained")
    panel.plot([0, 1], [0, 1], color="black", linewidth=0.6)
    for one in foresights:
        label = f"{one.trace}, T={one.temperature:g}"
        panel.plot([b.predicted for b in one.bins], [b.expected for b in one.bins], marker="o", label=label)
    panel.set_xlabel("predicted acceptance")
    panel.set_ylabel("acceptance (greedy) or overlap")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    return figure
