"""What happened step by step in the latest round of each contender, and how its signals went with acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsde.bench.cell import Cell
from dsde.bench.engines import OnStep
from dsde.control.arrays import Floats
from dsde.control.history import WINDOW
from dsde.control.records import SpeculationPlan, StepObservation
from dsde.control.signals import weighted_variance, wvir

__all__ = ["FALLING", "SIGNALS", "Trail", "Trails", "acceptance", "auc", "slots", "spearman"]

SIGNALS = {
    "confidence": "draft confidence of the first slot",
    "entropy": "draft entropy of the first slot (nats)",
    "kld": "mean KLD of the step before (nats)",
    "wvir": "WVIR after the step before",
    "average": "accepted share of the slots tried so far",
}
"""Signal -> what it is. All are known before the step whose acceptance they are held against."""

FALLING = ("entropy", "kld", "wvir")
"""Signals that speak against acceptance where they are high."""

AVERAGE_MEMORY = 0.95
"""Weight of a request's slots, per step that has passed since they were verified, within its average."""

# The paper's windows and decay.
SHORT, DECAY = 10, 0.85


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


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One verification of a request's drafts. before: what was known of the request, without the drafter's confidence.

    top_prob, entropy: what the drafter said of each slot; empty where it was not asked.
    """

    before: dict[str, float]
    top_prob: list[float]
    entropy: list[float]
    drafted: int
    accepted: int


def acceptance(trails: Sequence[Trail]) -> dict[str, tuple[Floats, Floats]]:
    """Signal -> (its values, the accepted share of the verified drafts), one entry per request and step."""
    values: dict[str, list[float]] = {signal: [] for signal in SIGNALS}
    shares: dict[str, list[float]] = {signal: [] for signal in SIGNALS}
    for attempt in _attempts(trails):
        said = {"confidence": attempt.top_prob[0], "entropy": attempt.entropy[0]} if attempt.top_prob else {}
        for signal, value in (attempt.before | said).items():
            values[signal].append(value)
            shares[signal].append(attempt.accepted / attempt.drafted)
    return {signal: (np.array(values[signal]), np.array(shares[signal])) for signal in SIGNALS}


def slots(trails: Sequence[Trail]) -> tuple[Floats, Floats, Floats]:
    """The slots up to and with each first rejection: (signals [N, len(SIGNALS)], positions [N] from 1, labels [N]).

    A label is 1 where the slot was accepted and else 0. Confidence and entropy are the slot's own; a signal that was
    not known is NaN.
    """
    rows: list[list[float]] = []
    positions: list[float] = []
    labels: list[float] = []
    for attempt in _attempts(trails):
        for slot in range(min(attempt.accepted + 1, attempt.drafted)):
            known = dict(attempt.before)
            if slot < len(attempt.top_prob):
                known |= {"confidence": attempt.top_prob[slot], "entropy": attempt.entropy[slot]}
            rows.append([known.get(signal, float("nan")) for signal in SIGNALS])
            positions.append(slot + 1.0)
            labels.append(float(slot < attempt.accepted))
    return np.array(rows).reshape(-1, len(SIGNALS)), np.array(positions), np.array(labels)


def _attempts(trails: Sequence[Trail]) -> Iterator[_Attempt]:
    for trail in trails:
        known: dict[str, dict[str, float]] = {}
        said: dict[str, tuple[list[float], list[float]]] = {}
        klds: dict[str, list[float]] = {}
        sums: dict[str, tuple[float, float]] = {}
        for observation, _ in trail.steps:
            positions = np.split(observation.kld.astype(np.float64), np.cumsum(observation.num_draft_tokens)[:-1])
            accepted = observation.num_accepted_tokens.tolist()
            for request, kld, taken in zip(observation.request_ids, positions, accepted, strict=True):
                before = known.pop(request, {})
                top, entropy = said.pop(request, ([], []))
                if not kld.size:
                    continue
                yield _Attempt(before, top, entropy, kld.size, taken)
                history = klds.setdefault(request, [])
                history += kld.tolist()
                del history[:-WINDOW]
                hits, tries = (AVERAGE_MEMORY * one for one in sums.get(request, (0.0, 0.0)))
                hits, tries = sums[request] = hits + taken, tries + min(taken + 1, kld.size)
                now = {"kld": float(kld.mean()), "wvir": _wvir(history), "average": hits / tries}
                known[request] = {signal: value for signal, value in now.items() if np.isfinite(value)}
            if observation.draft_top_prob is not None and observation.draft_entropy is not None:
                rows = zip(observation.draft_top_prob.tolist(), observation.draft_entropy.tolist(), strict=True)
                said.update(zip(observation.draft_ids, rows, strict=True))


def spearman(one: Floats, other: Floats) -> float | None:
    """Rank correlation, ties at their mean rank; None for fewer than three pairs or a constant side."""
    if len(one) < 3 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def auc(scores: Floats, labels: Floats) -> float | None:
    """Area under the ROC curve: the chance that a slot with label 1 scores higher than one with 0, ties counted half.

    None without both labels.
    """
    positive = labels > 0.5
    ones = int(positive.sum())
    if ones in (0, len(labels)):
        return None
    above = _ranks(scores)[positive].sum() - ones * (ones + 1) / 2.0
    return float(above / (ones * (len(labels) - ones)))


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
