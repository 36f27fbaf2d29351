"""Policy `goodput`: draft and verify what pays, by prices learnt while serving.

Before drafting a price of time is fixed: rho, the best rate of tokens that the batch can reach. A slot is verified iff
its survival exceeds rho times the cost of one more token; the batch drafts as deep as that pays for. Loss against plain
decoding is bounded by a ledger. Where drafting pays only if acceptance is one standard error above what is expected,
one draft token a step finds out; while speculation rests, cheap probes find out when it would pay again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.control.arrays import Floats, Ints, first_slots
from dsde.control.history import Newest, Recent
from dsde.control.ledger import Ledger
from dsde.control.policies.base import Batch, Policy, Proposal, Signals, Step
from dsde.control.policies.paper import Paper, PaperSettings
from dsde.control.price import Costs, Price, best_price
from dsde.control.price_stop import PriceStop

__all__ = ["Goodput", "GoodputSettings"]

MARGIN = 1.1
"""Slots must be worth this much more than the price: predictions of what was picked for being high are too high."""
RESUME = 1.02
"""Rate, against plain decoding, that resting speculation must promise before it goes on."""
PROBE_SHARE = 0.003
"""Share of the time since the last probe that the next may cost."""
SURE = 1.25
"""Rate, against plain decoding, above which nobody asks whether plain decoding is as slow as it is thought to be."""
CHECK_EVERY = 8
"""Steps between two such questions."""
PATIENCE = 16
"""Steps for which a decision to rest stands while the batch keeps its size."""
STOP_GAIN = 0.04
"""Share of a step that a stop rule saves at batch 1 when greedy, by replay; it falls with the batch size."""
STOP_TRIAL = 32
"""One drafting in so many goes against the rule of thumb, to learn what stopping costs."""
PROBE_PART = 8
"""One in so many requests drafts in a probe."""


@dataclass(frozen=True, slots=True)
class GoodputSettings:
    """It has none: what it needs to know it learns."""


class Goodput(Policy):
    """Prices, trims, rests and probes. Stability is measured as the paper's preset measures it, and decides nothing."""

    name = "goodput"
    reads_confidence = True
    learns = True

    def __init__(self, settings: GoodputSettings, max_length: int) -> None:
        self.settings = settings
        self._measure = Paper(PaperSettings(), max_length)
        self.warmup_tokens = self._measure.warmup_tokens
        self._first_slots = first_slots(max_length)
        self._ledger = Ledger()
        self._speculating = True
        self._probing = self._exploring = False
        self._rested_ms = 0.0
        self._probe_ms = 0.0
        self._threshold = 0.0
        self._drafted = self._size = self._patience = 0
        self._costs = Costs(1.0, 0.0, 0.0)
        self._unchecked = 0

    def signals(self, recent: Newest) -> Signals:
        """As in `paper`."""
        return self._measure.signals(recent)

    def propose(self, recent: Recent, limits: Ints) -> Proposal:
        """Zeros: a history alone sets no price."""
        return Proposal(np.zeros_like(limits), np.zeros_like(limits))

    def plan(self, batch: Batch) -> Proposal:
        """Everybody drafts K* where trim() follows, else the slots that pay on what is known before drafting."""
        if self._rests_on(batch):
            lengths = self._probe(batch, self._costs)
            return Proposal(lengths, lengths)
        survival, share = batch.acceptance.expect(batch.slots)
        survival *= self._first_slots.take(batch.usable, 0)
        if not batch.trims:
            share = np.zeros_like(share)
        cost = batch.cost
        costs = self._costs = Costs(cost.verify(batch.size), cost.token(batch.size), cost.draft(batch.size))
        price = best_price(survival, share, batch.size, costs)
        plain = batch.size / costs.plain
        pays = price.depth > 0 and price.rate >= plain * (1.0 if self._speculating else RESUME)
        self._probing = False
        self._exploring = not pays and not self._ledger.overdrawn and self._promising(batch, share, costs)
        self._speculating = self._exploring or (pays and not self._ledger.overdrawn)
        if not self._speculating:
            lengths = self._probe(batch, costs)
            return Proposal(lengths, lengths)
        if price.rate < SURE * plain and self._checks(batch):
            return Proposal(np.zeros_like(batch.limits), batch.limits)
        if self._exploring:
            lengths = np.minimum(batch.usable, 1)
            return Proposal(lengths, lengths)
        self._threshold = MARGIN * price.rate * costs.token
        if batch.trims and self._stops(batch, price, costs):
            return Proposal(batch.usable, batch.usable, self._stop(batch, price.rate * costs.draft))
        lengths = np.minimum(batch.usable, price.depth)
        if not batch.trims:
            lengths = np.minimum(lengths, np.add.reduce(survival > self._threshold, 1))
        return Proposal(lengths, lengths)

    def observe(self, step: Step) -> None:
        """Book the step, unless other policies had a hand in it."""
        spent = step.verify_ms + step.draft_ms
        self._rested_ms = 0.0 if step.draft_ms else self._rested_ms + spent
        if self._probing and step.draft_ms:
            self._probe_ms = step.draft_ms
        if step.slots.size < step.size:
            return
        if step.draft_ms == 0.0 and not np.count_nonzero(step.drafted):
            self._ledger.rest(step.plain_ms)
            return
        emitted = 1.0 + sum(step.accepted.tolist()) / step.size
        self._ledger.book(step.plain_ms, emitted, spent, step.size)

    def trim(self, batch: Batch, lengths: Ints) -> Ints:
        """The prefix of slots whose survival is above the threshold that was fixed before drafting."""
        if self._probing or self._exploring:
            return lengths
        survival, drafted = batch.acceptance.drafts(batch.slots)
        worth = np.add.reduce(survival > self._threshold, 1)
        kept = np.minimum(lengths, worth)
        if 0 in drafted.tolist():
            np.copyto(kept, lengths, where=drafted == 0)
        return kept

    def _rests_on(self, batch: Batch) -> bool:
        """Whether speculation rests and nothing has changed: then the decision stands for a few steps."""
        if self._speculating or self._probing or batch.size != self._size or self._patience <= 0:
            self._size, self._patience = batch.size, PATIENCE
            return False
        self._patience -= 1
        return True

    def _promising(self, batch: Batch, share: Floats, costs: Costs) -> bool:
        """Whether drafting would pay if acceptance were as good as the little that was verified leaves possible."""
        survival = batch.acceptance.hopeful(batch.slots) * self._first_slots.take(batch.usable, 0)
        price = best_price(survival, share, batch.size, costs)
        return price.depth > 0 and price.rate >= RESUME * batch.size / costs.plain

    def _checks(self, batch: Batch) -> bool:
        """Whether to decode one step plainly, because the gain is small and what plain decoding takes is a guess."""
        self._unchecked += 1
        if self._unchecked < CHECK_EVERY or batch.cost.verified(batch.size):
            return False
        self._unchecked = 0
        return True

    def _stops(self, batch: Batch, price: Price, costs: Costs) -> bool:
        """Whether asking after every draft step costs less than the steps that it saves."""
        self._drafted += 1
        overhead = batch.cost.sync * price.depth
        pays = overhead * batch.size < STOP_GAIN * (costs.plain + costs.draft * price.depth)
        return pays != (self._drafted % STOP_TRIAL == 0)

    def _stop(self, batch: Batch, step_price: float) -> PriceStop:
        after, onward, own = batch.acceptance.inside(batch.slots)
        return PriceStop(batch.rows, after, onward, own, self._threshold, MARGIN * step_price)

    def _probe(self, batch: Batch, costs: Costs) -> Ints:
        """[B], length 1 for a few requests when the rest has been long enough to pay for it, else 0."""
        lengths = np.zeros_like(batch.limits)
        self._probing = False
        count = max(1, batch.slots.size // PROBE_PART)
        price = max(costs.draft + count * costs.token, self._probe_ms)
        if self._rested_ms * PROBE_SHARE < price:
            return lengths
        wait = np.where(batch.usable == 0, np.inf, batch.acceptance.undrafted(batch.slots))
        chosen = np.argsort(wait, kind="stable")[:count]
        lengths[chosen] = np.minimum(batch.usable[chosen], 1)
        self._probing = True
        self._rested_ms = 0.0
        return lengths
