"""How likely each request's draft tokens are to be accepted, before drafting and after it.

Per request an average over its own verified slots; for all requests three logistic models for each temperature regime
(greedy, sampled): `before` knows the average and the position, `after` also the drafter's confidence in the slot, and
`onward` its confidence in the slot before. Confidence is a function of the prefix, so nothing here depends on the token
drawn at a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsde.control.prediction import Logistic

__all__ = ["Acceptance", "Verification"]

FEATURES = 5
"""[1, logit of the draft's top probability, draft entropy - 1, standing of the request, ln position].

Standing: logit of the request's average, less that of all requests. The constant carries what is common to all, so that
nothing shifts under the other weights while the averages still settle.
"""
BEFORE_PRIOR = (0.4, 0.0, 0.0, 1.0, 0.0)
AFTER_PRIOR = (0.0, 0.5, 0.0, 0.5, 0.0)
ONWARD_PRIOR = (0.4, 0.1, 0.0, 0.9, 0.0)
CLIP = 0.005
"""Probabilities inside a logit stay this far from 0 and 1."""

FIRST = 0.6
FIRST_WEIGHT = 20.0
"""Acceptance taken for granted before anything is verified, and the slots it weighs."""
OWN_PRIOR = 3.0
"""Slots that the average of all requests weighs within a request's own."""
OWN_MEMORY = 0.95
UNDRAFTED_MEMORY = 0.97
"""A request's sums shrink by these at a step with and without drafts, toward the average of all requests."""
ALL_MEMORY = 0.999
LESSONS = 8
EARLY = 64
"""Verifications that are gathered before the models learn from them all, and requests from which they learn at once."""
RESOLUTION_MEMORY = 0.995
RESOLUTION_PRIOR = (0.5, 2.5)
"""Start of the sums under resolution: share .2, weight of a few dozen slots."""


class Verification:
    """One verification of R requests as dense [R, K] tables; K the longest draft verified. Built once per step.

    slots, drafted, accepted: [R] int64. overlap: [R, K] float64, sum_v min(p, q), anything beyond `drafted`.
    """

    __slots__ = ("accepted", "drafted", "overlap", "slots")

    def __init__(self, slots: Tensor, drafted: Tensor, accepted: Tensor, overlap: Tensor) -> None:
        self.slots, self.drafted, self.accepted, self.overlap = slots, drafted, accepted, overlap


class Acceptance:
    """State of every slot of the controller and the models they share. capacity: slots; max_length: longest draft.

    waiting: whether drafts are waiting for their verification.
    """

    def __init__(self, capacity: int, max_length: int) -> None:
        self._max_length = max_length
        self._features = torch.zeros(capacity, max_length, FEATURES, dtype=torch.float64)
        self._features[:, :, 0] = 1.0
        self._positions = torch.arange(1, max_length + 1, dtype=torch.float64).log()
        self._features[:, :, 4] = self._positions
        self._predicted = torch.zeros(capacity, max_length, dtype=torch.float64)
        self._pending = torch.zeros(capacity, dtype=torch.int64)
        self._sums = torch.zeros(capacity, 2, dtype=torch.float64)
        self._seen = torch.zeros(capacity, dtype=torch.float64)
        self._sampled = torch.zeros(capacity, dtype=torch.int64)
        self._all = torch.tensor([[FIRST * FIRST_WEIGHT, FIRST_WEIGHT]] * 2, dtype=torch.float64)
        self._spread = torch.tensor(RESOLUTION_PRIOR, dtype=torch.float64).view(1, 2, 1).repeat(2, 1, max_length)
        self._before = [Logistic(torch.tensor(BEFORE_PRIOR)) for _ in range(2)]
        self._after = [Logistic(torch.tensor(AFTER_PRIOR)) for _ in range(2)]
        self._onward = [Logistic(torch.tensor(ONWARD_PRIOR)) for _ in range(2)]
        self._informed = torch.zeros(capacity, dtype=torch.bool)
        self._steps = torch.arange(max_length)
        self._clock = 0.0
        self._known: tuple[Tensor, Tensor] | None = None
        self._lessons: list[Tensor] = []
        self._pupils: list[Tensor] = []
        self._taught = 0
        self.waiting = False

    def start(self, slot: int) -> None:
        """Begin a request in `slot`: no drafts, no average of its own."""
        self._pending[slot] = 0
        self._sums[slot] = 0.0
        self._seen[slot] = self._clock
        self._sampled[slot] = 0
        self._known = None

    def average(self, slots: Tensor) -> Tensor:
        """alpha, [B]: the request's own verified slots, newest weighted most, shrunk toward all requests' average."""
        if self._known is not None and (self._known[0] is slots or torch.equal(self._known[0], slots)):
            return self._known[1]
        own = self._sums.index_select(0, slots)
        idle = self._clock - self._seen.index_select(0, slots)
        own = own * (UNDRAFTED_MEMORY**idle).unsqueeze(1)
        prior = (self._all[:, 0] / self._all[:, 1]).index_select(0, self._sampled.index_select(0, slots))
        average = (own[:, 0] + OWN_PRIOR * prior) / (own[:, 1] + OWN_PRIOR)
        self._known = slots, average
        return average

    def undrafted(self, slots: Tensor) -> Tensor:
        """[B], decoding steps since each request's drafts were last verified, or since it began."""
        return self._clock - self._seen.index_select(0, slots)

    def expect(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Before drafting: survival of each slot, and the share of its variance that drafting resolves; both [B, L].

        Survival is the chance that this and all earlier slots are accepted. A share of 1 means that the drafter's
        confidence will tell exactly which slots survive, 0 that it tells nothing.
        """
        sampled = self._sampled.index_select(0, slots)
        survival = self._before_slots(self._standing(slots, sampled), sampled).cumprod(1)
        share = (self._spread[:, 0] / self._spread[:, 1]).clamp_(0.0, 1.0)
        return survival, share.index_select(0, sampled)

    def drafts(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """After drafting: survival of each drafted slot [B, L], and how many slots were drafted, [B] int64."""
        return self._predicted.index_select(0, slots).cumprod(1), self._pending.index_select(0, slots)

    def entropies(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """H(q) in nats of each drafted slot [B, L], and how many slots were drafted, [B] int64."""
        return self._features.index_select(0, slots)[:, :, 2] + 1.0, self._pending.index_select(0, slots)

    def tick(self) -> None:
        """One decoding step has passed."""
        self._clock += 1.0
        self._known = None

    def inside(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a rule inside the draft loop needs: weights [B, 5] of `after` and of `onward`, logit averages [B]."""
        sampled = self._sampled.index_select(0, slots)
        after, onward = (
            torch.stack([m.weights for m in models]).index_select(0, sampled) for models in (self._after, self._onward)
        )
        return after, onward, self._standing(slots, sampled)

    def draft(self, slots: Tensor, depth: int, top_prob: Tensor | None, entropy: Tensor | None) -> None:
        """Keep what the drafter said about the `depth` slots it has just drafted for B requests; both [B, depth].

        None where it has no distributions, and values that are not finite: then `before` stands in for `after`.
        """
        depth = min(depth, self._max_length)
        sampled = self._sampled.index_select(0, slots)
        own = self._standing(slots, sampled)
        self.waiting = True
        self._pending.index_fill_(0, slots, depth)
        rows = self._features.index_select(0, slots)
        rows[:, :, 3] = own.unsqueeze(1)
        said = None
        if top_prob is not None and entropy is not None:
            said = torch.stack((top_prob[:, :depth], entropy[:, :depth]), dim=2).double()
        finite = said is not None and bool(said.isfinite().all())
        if said is not None:
            said = said if finite else said.nan_to_num(0.5, 0.5, 0.5)
            rows[:, :depth, 1] = torch.logit(said[:, :, 0], eps=CLIP)
            rows[:, :depth, 2] = said[:, :, 1] - 1.0
            weights = torch.stack([model.weights for model in self._after]).index_select(0, sampled)
            predicted = torch.sigmoid(torch.bmm(rows, weights.unsqueeze(2)).squeeze(2))
        if said is None or not finite:
            expected = self._before_slots(own, sampled)
            informed = torch.zeros_like(sampled, dtype=torch.bool)
            if top_prob is not None and entropy is not None:
                informed = (top_prob[:, :depth] + entropy[:, :depth]).isfinite().all(1)
            predicted = expected if said is None else torch.where(informed.unsqueeze(1), predicted, expected)
            self._informed.index_copy_(0, slots, informed)
        else:
            self._informed.index_fill_(0, slots, True)
        self._features.index_copy_(0, slots, rows)
        self._predicted.index_copy_(0, slots, predicted)

    def learn(self, verification: Verification, temperature: Tensor) -> None:
        """Learn from verified slots up to and including the first rejection; temperature: [R].

        Label of a slot: accepted or not when greedy, its overlap otherwise. Slots that were drafted but not verified
        count for the average and for `before` with what `after` says of them, weighted by the chance to reach them:
        confidence chose what was verified, and without them both would believe the choice to be the rule.
        """
        slots, drafted, accepted = verification.slots, verification.drafted, verification.accepted
        sampled = self._sample(slots, temperature)
        self.waiting = False
        pending = self._pending.index_select(0, slots)
        known = (pending >= drafted) & (pending > 0)
        self._pending.index_fill_(0, slots, 0)
        if not bool(known.any()):
            return
        if not bool(known.all()):
            slots, drafted, accepted, sampled, pending = (
                t[known] for t in (slots, drafted, accepted, sampled, pending)
            )
        overlap = verification.overlap if slots.numel() == known.numel() else verification.overlap[known]
        depth = int(pending.max())
        step = self._steps[:depth]
        predicted = self._predicted.index_select(0, slots)[:, :depth]

        verified = step < drafted.unsqueeze(1)
        labels = (step < accepted.unsqueeze(1)).double()
        width = min(depth, overlap.shape[1])
        soft = labels.clone()
        soft[:, :width] = overlap[:, :width]
        labels = torch.where((sampled > 0).unsqueeze(1), soft, labels)
        real = verified & (step <= accepted.unsqueeze(1)) & labels.isfinite()

        unread = (accepted >= drafted).unsqueeze(1) & ~verified & (step < pending.unsqueeze(1))
        reach = torch.where(verified, 1.0, predicted).cumprod(1).roll(1, 1)
        reach[:, 0] = 1.0
        labels = torch.where(real, labels, predicted).clamp_(0.0, 1.0)
        weight = torch.where(real, 1.0, torch.where(unread, reach, 0.0))

        sums = torch.stack(((weight * labels).sum(1), weight.sum(1)), dim=1)
        idle = self._clock - self._seen.index_select(0, slots) - 1.0
        kept = (OWN_MEMORY * UNDRAFTED_MEMORY ** idle.clamp_(min=0.0)).unsqueeze(1)
        self._sums.index_copy_(0, slots, self._sums.index_select(0, slots) * kept + sums)
        self._seen.index_fill_(0, slots, self._clock)
        self._known = None
        self._all *= ALL_MEMORY
        self._all.index_add_(0, sampled, sums)

        rows = slots.numel()
        lesson = torch.zeros(rows, self._max_length, FEATURES + 4, dtype=torch.float64)
        lesson[:, :, :FEATURES] = self._features.index_select(0, slots)
        informed = self._informed.index_select(0, slots).unsqueeze(1) & (step < pending.unsqueeze(1))
        lesson[:, :depth, FEATURES:] = torch.stack(
            (labels, weight, real.double(), informed.double()),
            dim=2,
        )
        self._lessons.append(lesson)
        self._pupils.append(sampled)
        self._taught += rows
        if self._taught < EARLY or len(self._lessons) >= LESSONS:
            self._study()

    def rest(self, slots: Tensor, temperature: Tensor) -> None:
        """R requests decoded without drafts, and none were waiting; temperature: [R]."""
        self._sample(slots, temperature)

    def _sample(self, slots: Tensor, temperature: Tensor) -> Tensor:
        sampled = (temperature > 0.0).long()
        self._sampled.index_copy_(0, slots, sampled)
        self._known = None
        return sampled

    def _study(self) -> None:
        """Teach the models all that was gathered since the last time."""
        lessons, pupils, steps = torch.cat(self._lessons), torch.cat(self._pupils), len(self._lessons)
        self._lessons.clear()
        self._pupils.clear()
        for regime in (0, 1):
            mine = lessons[pupils == regime]
            if not mine.numel():
                continue
            features, (labels, weight, real, informed) = mine[:, :, :FEATURES], mine[:, :, FEATURES:].unbind(2)
            blind = features.clone()
            blind[:, :, 1:3] = 0.0
            self._resolve(regime, features, blind, informed, steps)
            onward, reached = features.clone(), weight * informed
            onward[:, 1:, 1:3] = features[:, :-1, 1:3]
            reached[:, 0] = 0.0
            for model, x, w in (
                (self._after[regime], features, real * informed),
                (self._before[regime], blind, weight),
                (self._onward[regime], onward, reached),
            ):
                model.learn(x.reshape(-1, FEATURES), labels.reshape(-1), w.reshape(-1), steps)

    def _resolve(self, regime: int, features: Tensor, blind: Tensor, drafted: Tensor, steps: int) -> None:
        """Learn how much of a survival's variance drafting resolves, from rows [N, L, 5]; drafted: [N, L], 0 or 1."""
        mean = self._before[regime].predict(blind).cumprod(1)
        known = self._after[regime].predict(features).cumprod(1)
        both = torch.stack(((known - mean).square_(), mean * (1.0 - mean))) * drafted
        self._spread[regime] = self._spread[regime] * RESOLUTION_MEMORY**steps + both.sum(1)

    def _standing(self, slots: Tensor, sampled: Tensor) -> Tensor:
        """[B], logit of each request's average, less that of all requests at its temperature regime."""
        everybody = torch.logit(self._all[:, 0] / self._all[:, 1], eps=CLIP).index_select(0, sampled)
        return torch.logit(self.average(slots), eps=CLIP) - everybody

    def _before_slots(self, own: Tensor, sampled: Tensor) -> Tensor:
        """[B, L], each slot's acceptance given its predecessors', from standings `own` [B]."""
        weights = torch.stack([model.weights for model in self._before]).index_select(0, sampled)
        base = weights[:, 0] + weights[:, 3] * own
        return torch.sigmoid(base.unsqueeze(1) + weights[:, 4:5] * self._positions)
