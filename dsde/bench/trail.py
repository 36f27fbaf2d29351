"""What happened step by step in the latest round of each contender, and how its signals went with acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsde.bench.cell import Cell
from dsde.bench.engines import OnStep
from dsde.control.history import WINDOW
from dsde.control.records import SpeculationPlan, StepObservation
from dsde.control.signals import weighted_variance, wvir

__all__ = ["SIGNALS", "Trail", "Trails", "acceptance", "spearman"]

SIGNALS = {
    "confidence": "draft confidence of the first slot",
    "entropy": "draft entropy of the first slot (nats)",
    "kld": "mean KLD of the step before (nats)",
    "wvir": "WVIR after the step before",
}
"""Signal -> what it is. All are known before the step whose acceptance they are held against."""

# The paper's windows and decay.
SHORT, DECAY = 10, 0.85

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Trail:
    """The steps of one run, each with the plan made at its end."""

    steps: list[tuple[StepObservation, SpeculationPlan | None]] = field(default_factory=list)

    def add(self, observation: StepObservation, plan: SpeculationPlan | None) -> None:
        """Append a step."""
        self.steps.append((observation, plan))

    def lengths(self) -> list[list[int]]:
        """Speculation lengths of all requests, step by step, as they were verified."""
        return [observation.num_draft_tokens.tolist() for observation, _ in self.steps]


class Trails:
    """The trail of every contender in every cell, of its latest round, and those of the runs observed for signals."""

    def __init__(self) -> None:
        self._trails: dict[tuple[Cell, str], Trail] = {}
        self._observed: dict[Cell, list[Trail]] = {}

    def watch(self, cell: Cell, label: str) -> OnStep:
        """An observer for a measured run that begins; the trail of the round before is dropped."""
        trail = self._trails[cell, label] = Trail()
        return trail.add

    def observe(self, cell: Cell, label: str) -> OnStep:
        """An observer for a run at a fixed length: there every step is drafted alike, whatever its signals are."""
        trail = Trail()
        self._observed.setdefault(cell, []).append(trail)
        return trail.add

    def of(self, cell: Cell) -> dict[str, Trail]:
        """Contender -> its trail in this cell."""
        return {label: trail for (where, label), trail in self._trails.items() if where == cell}

    def observed(self) -> dict[tuple[str, float], list[Trail]]:
        """(draft, temperature) -> all trails that were observed for signals."""
        found: dict[tuple[str, float], list[Trail]] = {}
        for cell, trails in self._observed.items():
            found.setdefault((cell.draft, cell.scene.temperature), []).extend(trails)
        return found

    @property
    def cells(self) -> list[Cell]:
        """Every cell with a trail, in the order of measurement."""
        return list(dict.fromkeys(where for where, _ in self._trails))


def acceptance(trails: Sequence[Trail]) -> dict[str, tuple[Floats, Floats]]:
    """Signal -> (its values, the accepted share of the verified drafts), one entry per request and step."""
    values: dict[str, list[float]] = {signal: [] for signal in SIGNALS}
    shares: dict[str, list[float]] = {signal: [] for signal in SIGNALS}
    for trail in trails:
        known: dict[str, dict[str, float]] = {}
        klds: dict[str, list[float]] = {}
        for observation, _ in trail.steps:
            positions = np.split(observation.kld.astype(np.float64), np.cumsum(observation.num_draft_tokens)[:-1])
            for request, kld, accepted in zip(
                observation.request_ids, positions, observation.num_accepted_tokens.tolist(), strict=True
            ):
                before = known.pop(request, {})
                if not kld.size:
                    continue
                for signal, value in before.items():
                    if np.isfinite(value):
                        values[signal].append(value)
                        shares[signal].append(accepted / kld.size)
                history = klds.setdefault(request, [])
                history += kld.tolist()
                del history[:-WINDOW]
                known[request] = {"kld": float(kld.mean()), "wvir": _wvir(history)}
            if observation.draft_top_prob is not None and observation.draft_entropy is not None:
                top, entropy = observation.draft_top_prob[:, 0].tolist(), observation.draft_entropy[:, 0].tolist()
                for request, confidence, nats in zip(observation.draft_ids, top, entropy, strict=True):
                    known.setdefault(request, {}).update(confidence=confidence, entropy=nats)
    return {signal: (np.array(values[signal]), np.array(shares[signal])) for signal in SIGNALS}


def spearman(one: Floats, other: Floats) -> float | None:
    """Rank correlation, ties at their mean rank; None for fewer than three pairs or a constant side."""
    if len(one) < 3 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = (ends - (counts - 1) / 2.0)[inverse]
    return ranks


def _wvir(klds: Sequence[float]) -> float:
    if len(klds) < WINDOW:
        # Over less than the long window both variances are of nearly the same values.
        return float("nan")
    values = np.array([klds], dtype=np.float64)
    short = weighted_variance(values[:, -SHORT:], np.array([SHORT]), DECAY)
    long = weighted_variance(values[:, -WINDOW:], np.array([WINDOW]), DECAY)
    return float(wvir(short, long)[0])
