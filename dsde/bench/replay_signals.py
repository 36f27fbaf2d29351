"""What foretells acceptance: single signals, and the controller's own prediction of each slot before it is verified.

Every request is replayed once at a fixed length, one after the other: first the half that the controller learns from,
then the held-out half, on which slots are predicted before they are learnt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dsde.bench.replays import halves
from dsde.bench.trail import FALLING, SIGNALS, Trail, acceptance, auc, slots, spearman
from dsde.bench.workload import MIX
from dsde.control.arrays import Floats, Ints
from dsde.control.controller import Controller
from dsde.control.policies.base import Batch
from dsde.control.policies.static import Static, StaticSettings
from dsde.control.records import SpeculationPlan, StepObservation
from dsde.control.replay import COSTS, replay
from dsde.control.trace import Trace

__all__ = ["Bin", "Foresight", "calibration", "foresee"]

BINS = 10
ABLATION: Mapping[str, tuple[int, ...]] = {"none": (), "kld": (0,), "wvir": (1,), "both": (0, 1)}
"""Signals that are added to confidence, entropy, average and position: KLD, WVIR, or both."""
NEWTON_STEPS = 12
RIDGE = 1.0


@dataclass(frozen=True, slots=True)
class Bin:
    """Slots whose predictions are alike: their mean prediction, their mean label, how many there are."""

    predicted: float
    expected: float
    slots: int


@dataclass(frozen=True, slots=True)
class Foresight:
    """One trace at one temperature, drafted at a fixed `length`.

    correlations: workload, `mix` for all -> signal -> Spearman's coefficient with the accepted share of the step that
    follows, over all requests. steps: workload -> pairs of the signal that has the most.
    Of the held-out requests, per slot up to and with the first rejection: auc: workload -> signal -> AUC, of the
    negated value for entropy, KLD and WVIR. ablation: signals that are added to confidence, entropy and average -> AUC
    of a logistic model fitted to the other half, `none` without them; all over the slots that have every signal, of
    which there are ablated. controller_auc, calibration_error, bins: of the predicted acceptance given that all earlier
    slots were accepted. The AUC's label is whether the slot was accepted; that of calibration is the same when greedy
    and the slot's overlap at temperature > 0. predicted, expected: mean prediction and label. None where there are no
    two kinds of labels, or no slots.
    """

    trace: str
    temperature: float
    length: int
    correlations: Mapping[str, Mapping[str, float | None]]
    steps: Mapping[str, int]
    auc: Mapping[str, Mapping[str, float | None]]
    ablation: Mapping[str, float | None]
    ablated: int
    controller_auc: float | None
    calibration_error: float | None
    predicted: float | None
    expected: float | None
    slots: int
    bins: tuple[Bin, ...]

    def to_dict(self) -> dict[str, Any]:
        """One entry of the JSON file's `signals`."""
        return asdict(self)


def foresee(name: str, trace: Trace, temperature: float, length: int, seed: int = 0) -> Foresight:
    """Replay the trace, which is of one temperature, at `length` draft tokens."""
    probe = _Probe(length)
    tuning, reported = halves(trace)
    witness = _Witness(probe, trace)
    first = witness.watch(tuning, seed)
    second = witness.watch(reported, seed)

    workloads: dict[str, list[Trail]] = {MIX: []}
    for seen in (first, second):
        for workload, trail in seen.trails.items():
            workloads[MIX].append(trail)
            if workload != MIX:
                workloads.setdefault(workload, []).append(trail)
    pairs = {workload: acceptance(trails) for workload, trails in sorted(workloads.items(), key=_all_first)}
    held_out = {MIX: list(second.trails.values())}
    held_out |= {workload: [trail] for workload, trail in sorted(second.trails.items()) if workload != MIX}
    ablation, ablated = _ablation(list(first.trails.values()), held_out[MIX])
    predicted, accepted, overlap = (np.array(column) for column in (second.predicted, second.accepted, second.overlap))
    expected = accepted if temperature == 0.0 else overlap
    error, bins = calibration(predicted, expected)
    return Foresight(
        trace=name,
        temperature=temperature,
        length=length,
        correlations={w: {signal: spearman(*own[signal]) for signal in SIGNALS} for w, own in pairs.items()},
        steps={w: max(len(values) for values, _ in own.values()) for w, own in pairs.items()},
        auc={workload: _single(trails) for workload, trails in held_out.items()},
        ablation=ablation,
        ablated=ablated,
        controller_auc=auc(predicted, accepted),
        calibration_error=error,
        predicted=float(predicted.mean()) if len(predicted) else None,
        expected=float(expected.mean()) if len(expected) else None,
        slots=len(predicted),
        bins=bins,
    )


def calibration(predicted: Floats, expected: Floats) -> tuple[float | None, tuple[Bin, ...]]:
    """Expected calibration error, sum_b n_b / N |mean prediction - mean label| over ten bins of equal count; the bins.

    None without slots.
    """
    parts = [part for part in np.array_split(np.argsort(predicted, kind="stable"), BINS) if len(part)]
    bins = tuple(Bin(float(predicted[part].mean()), float(expected[part].mean()), len(part)) for part in parts)
    if not bins:
        return None, ()
    return sum(one.slots * abs(one.predicted - one.expected) for one in bins) / len(predicted), bins


def _single(trails: Sequence[Trail]) -> dict[str, float | None]:
    """Signal -> AUC over the slots that have it."""
    values, _, labels = slots(trails)
    found = {}
    for column, signal in enumerate(SIGNALS):
        known = ~np.isnan(values[:, column])
        scores = values[known, column]
        found[signal] = auc(-scores if signal in FALLING else scores, labels[known])
    return found


def _ablation(fit: Sequence[Trail], held_out: Sequence[Trail]) -> tuple[dict[str, float | None], int]:
    """Added signals -> AUC on the held-out slots that have every signal; how many these are."""
    (rows, labels), (others, wanted) = _shaped(fit), _shaped(held_out)
    found: dict[str, float | None] = {}
    for name, added in ABLATION.items():
        columns = [*range(4), *(4 + n for n in added)]
        weights = _logistic(rows[:, columns], labels)
        found[name] = None if weights is None else auc(others[:, columns] @ weights[:-1], wanted)
    return found, len(wanted)


def _shaped(trails: Sequence[Trail]) -> tuple[Floats, Floats]:
    """(features [N, 6], labels [N]) of the slots that have every signal, KLD and WVIR last; none spans decades."""
    values, positions, labels = slots(trails)
    known = ~np.isnan(values).any(axis=1)
    by_name = dict(zip(SIGNALS, values[known].T, strict=True))
    top = np.clip(by_name["confidence"], 1e-3, 1.0 - 1e-3)
    columns = (
        np.log(top / (1.0 - top)),
        by_name["entropy"],
        by_name["average"],
        np.log(positions[known]),
        np.log(by_name["kld"] + 1e-3),
        np.log(by_name["wvir"] + 1e-3),
    )
    return np.column_stack(columns), labels[known]


def _logistic(rows: Floats, labels: Floats) -> Floats | None:
    """Weights of a logistic regression, the constant last, by Newton's method; None without both labels."""
    if not 0.0 < labels.mean() < 1.0 if len(labels) else True:
        return None
    scale = rows.std(axis=0) + 1e-9
    x = np.column_stack((rows / scale, np.ones(len(rows))))
    weights = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        chance = 1.0 / (1.0 + np.exp(-np.clip(x @ weights, -30.0, 30.0)))
        curvature = (x * (chance * (1.0 - chance))[:, None]).T @ x + RIDGE * np.eye(len(weights))
        weights += np.linalg.solve(curvature, x.T @ (labels - chance) - RIDGE * weights)
    weights[:-1] /= scale
    return weights


def _all_first(item: tuple[str, Any]) -> tuple[bool, str]:
    return item[0] != MIX, item[0]


class _Probe(Static):
    """A fixed length that notes what the controller predicts of every slot. said: request id -> its latest draft."""

    reads_confidence = True

    def __init__(self, length: int) -> None:
        super().__init__(StaticSettings(length), length)
        self.said: dict[str, list[float]] = {}

    def trim(self, batch: Batch, lengths: Ints) -> Ints:
        survival, counts = batch.acceptance.drafts(batch.slots)
        before = np.concatenate((np.ones((len(survival), 1)), survival[:, :-1]), axis=1)
        chances = survival / np.maximum(before, 1e-300)
        for request, row, count in zip(batch.rows, chances, counts.tolist(), strict=True):
            self.said[request] = row[:count].tolist()
        return lengths


@dataclass(slots=True)
class _Seen:
    """Steps of each workload, and per slot up to and with the first rejection what was predicted and what came."""

    trails: dict[str, Trail] = field(default_factory=dict)
    predicted: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)


class _Witness(Controller):
    """Watches what it is told before it learns from it; one request decodes at a time."""

    def __init__(self, probe: _Probe, trace: Trace) -> None:
        super().__init__(probe, capacity=1, max_length=probe.settings.length, trims=True)
        self._probe = probe
        self._workloads = {request.request_id: request.workload for request in trace.requests}
        self._seen = _Seen()
        self._wanted = 0

    def watch(self, trace: Trace, seed: int) -> _Seen:
        """Replay every request of the trace once; what was seen."""
        self._seen, self._wanted = _Seen(), len(trace.requests)
        # No request emits more: each of its recorded tokens, and at most one beyond its end.
        tokens = sum(1 + sum(one.accepted + 1 for one in request.rounds) for request in trace.requests)
        # Costs decide nothing at a fixed length.
        replay(self._probe.name, trace, COSTS["cpu"], [(1, tokens)], seed=seed, controller=self)
        return self._seen

    def observe(self, observation: StepObservation, plan: SpeculationPlan | None = None) -> None:
        [request] = observation.request_ids
        number, _, name = request.partition("-")
        # The replay goes on with the first request again until its tokens are used up.
        if int(number) < self._wanted:
            self._seen.trails.setdefault(self._workloads[name], Trail()).add(observation, plan)
            self._note(request, observation)
        super().observe(observation, plan)

    def _note(self, request: str, observation: StepObservation) -> None:
        said = self._probe.said.pop(request, [])
        [drafted], [accepted] = observation.num_draft_tokens.tolist(), observation.num_accepted_tokens.tolist()
        tried = min(accepted + 1, drafted, len(said))
        self._seen.predicted += said[:tried]
        self._seen.accepted += [float(slot < accepted) for slot in range(tried)]
        self._seen.overlap += observation.overlap.tolist()[:tried]
