"""Baseline `adaedl` (arXiv 2410.18351): a request stops drafting when a bound on its acceptance falls too low.

The bound of a slot is 1 - sqrt(gamma H(q)), H the draft's entropy in nats; the threshold lambda follows the request's
acceptance rate. The slot at which it falls is drawn, since its forward has run, but not verified; the first slot
always is, because the published method never rests. Without trim(), in asynchronous scheduling, no stop is possible
and every request has its base length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsde.control.arrays import Bools, Ints, Numbers
from dsde.control.history import Newest, Recent
from dsde.control.policies.base import Batch, Policy, Proposal, Signals, Step, check_number
from dsde.control.policies.paper import Paper, PaperSettings
from dsde.control.records import DraftStop

__all__ = ["AdaEdl", "AdaEdlSettings"]

BASE_LENGTH = 7
TARGET_RATE = 0.9
STEP = 0.01
RATE_MEMORY = 0.5
THRESHOLD_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class AdaEdlSettings:
    """length: base length in draft tokens; None = 7, or the longest where that is shorter. gamma: weight of the entropy
    under the root. threshold: lambda of a new request.
    """

    length: int | None = None
    gamma: float = 0.5
    threshold: float = 0.4

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, 0, 100)
        check_number("threshold", self.threshold, -10, 1)


class AdaEdl(Policy):
    """Base length for everyone, cut at the first slot whose bound is below the request's lambda."""

    name = "adaedl"
    reads_confidence = True

    def __init__(self, settings: AdaEdlSettings, max_length: int) -> None:
        if settings.length is not None:
            check_number("length", settings.length, 0, max_length, integer=True)
        self._length = min(BASE_LENGTH, max_length) if settings.length is None else settings.length
        self.settings = replace(settings, length=self._length)
        self._measure = Paper(PaperSettings(), max_length)
        self.warmup_tokens = self._measure.warmup_tokens

    def signals(self, recent: Newest) -> Signals:
        """As in `paper`."""
        return self._measure.signals(recent)

    def propose(self, recent: Recent, limits: Ints) -> Proposal:
        """min(base length, limit) for each request."""
        lengths = np.minimum(limits, self._length)
        return Proposal(lengths, lengths)

    def attach(self, capacity: int) -> None:
        """Lambda and the smoothed acceptance rate of each slot."""
        self._threshold = np.full(capacity, self.settings.threshold, dtype=np.float64)
        self._rate = np.full(capacity, TARGET_RATE)

    def start(self, slots: Ints) -> None:
        """A request begins with the configured lambda and, as its rate, the target at which lambda stays."""
        self._threshold[slots] = self.settings.threshold
        self._rate[slots] = TARGET_RATE

    def plan(self, batch: Batch) -> Proposal:
        """Base lengths, and the rule that stops the loop once everybody has stopped."""
        lengths = np.minimum(batch.limits, self._length)
        if not batch.trims:
            return Proposal(lengths, lengths)
        thresholds = self._threshold.take(batch.slots).tolist()
        usable = np.minimum(lengths, batch.usable).tolist()
        rules = zip(thresholds, usable, strict=True)
        return Proposal(lengths, lengths, EntropyStop(self.settings.gamma, dict(zip(batch.rows, rules, strict=True))))

    def observe(self, step: Step) -> None:
        """r <- .5 r + .5 rate; lambda' = lambda + .01 if r < .9, lambda - .01 if r > .9 and all were accepted; lambda
        <- .9 lambda + .1 lambda'. A step without drafts changes nothing.
        """
        drafted = step.drafted > 0
        slots = step.slots[drafted]
        if not slots.size:
            return
        accepted, count = step.accepted[drafted], step.drafted[drafted]
        rate = RATE_MEMORY * self._rate[slots] + (1.0 - RATE_MEMORY) * accepted / count
        raised = (rate < TARGET_RATE).astype(np.float64) - ((rate > TARGET_RATE) & (accepted == count))
        self._rate[slots] = rate
        self._threshold[slots] += (1.0 - THRESHOLD_MEMORY) * STEP * raised

    def trim(self, batch: Batch, lengths: Ints) -> Ints:
        """Slots before the first whose bound is below lambda, at least one."""
        entropy, drafted = batch.acceptance.entropies(batch.slots)
        threshold = self._threshold.take(batch.slots)[:, None]
        kept = np.add.reduce(np.logical_and.accumulate(bound(entropy, self.settings.gamma) >= threshold, 1), 1)
        return np.where(drafted > 0, np.minimum(lengths, np.maximum(kept, 1)), lengths)


def bound(entropy: Numbers, gamma: float) -> Numbers:
    """1 - sqrt(gamma H), the lower bound on the acceptance of a slot whose draft entropy is H nats."""
    return 1.0 - np.sqrt(gamma * np.maximum(entropy, 0.0))


@dataclass(frozen=True, slots=True)
class EntropyStop:
    """AdaEDL inside the draft loop. rules: request id -> (lambda, length)."""

    gamma: float
    rules: Mapping[str, tuple[float, int]]
    order: tuple[tuple[float, int], ...] = ()

    def bind(self, request_ids: Sequence[str]) -> DraftStop:
        """The rule with its requests in batch order."""
        return replace(self, order=tuple(self.rules.get(i, (0.0, 0)) for i in request_ids))

    def goes_on(self, step: int, top_prob: Numbers, entropy: Numbers) -> Bools:
        """Requests whose bound is still at least lambda and whose length is not reached."""
        table = np.array(self.order).reshape(-1, 2)
        kept: Bools = bound(entropy, self.gamma) >= table[:, 0].astype(entropy.dtype)
        return kept & (table[:, 1] > step + 1)
