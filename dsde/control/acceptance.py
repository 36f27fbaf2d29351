"""How likely each request's draft tokens are to be accepted, before drafting and after it.

Per request an average over its own verified slots; for all requests three logistic models for each temperature regime
(greedy, sampled): `before` knows the average and the position, `after` also the drafter's confidence in the slot, and
`onward` its confidence in the slot before. Confidence is a function of the prefix, so nothing here depends on the token
drawn at a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsde.control.arrays import ONE, Bools, Floats, Ints, Numbers, first_slots
from dsde.control.prediction import Logistic, logit, sigmoid

__all__ = ["Acceptance", "Verification"]

FEATURES = 5
"""[1, logit of the draft's top probability, draft entropy - 1, standing of the request, ln position].

Standing: logit of the request's average, less that of all requests. The constant carries what is common to all, so that
nothing shifts under the other weights while the averages still settle.
"""
# .4 is the logit of FIRST, for a slot of which only the constant speaks.
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
FORGOTTEN = 2048
"""Steps without drafts after which nothing is left of a request's sums that a float64 could show."""
ALL_MEMORY = 0.999
LESSONS = 8
EARLY = 64
"""Verifications that are gathered before the models learn from them all, and requests from which they learn at once."""
RESOLUTION_MEMORY = 0.995
RESOLUTION_PRIOR = (0.5, 2.5)
"""Start of the sums under resolution: share .2, weight of a few dozen slots."""
ONE_DRAFT = np.array(1)


class Verification:
    """One verification of R requests as dense [R, K] tables; K the longest draft verified. Built once per step.

    slots, drafted, accepted: [R] int64. overlap: [R, K], sum_v min(p, q), anything beyond `drafted`.
    """

    __slots__ = ("accepted", "drafted", "overlap", "slots")

    def __init__(self, slots: Ints, drafted: Ints, accepted: Ints, overlap: Numbers) -> None:
        self.slots, self.drafted, self.accepted, self.overlap = slots, drafted, accepted, overlap


class _Lesson(NamedTuple):
    """What R requests' drafts were like, and what became of them.

    sampled, informed, pending: [R]; informed: whether the drafter said anything of the `pending` slots it drafted.
    features: [R, L, FEATURES]. labels, weight, real: [R, L]; real: 1 where the slot was verified, up to a rejection.
    """

    sampled: Ints
    features: Floats
    labels: Floats
    weight: Floats
    real: Floats
    informed: Bools
    pending: Ints


class Acceptance:
    """State of every slot of the controller and the models they share. capacity: slots; max_length: longest draft.

    waiting: whether drafts are waiting for their verification.
    """

    def __init__(self, capacity: int, max_length: int) -> None:
        self._max_length = max_length
        self._features = np.zeros((capacity, max_length, FEATURES))
        self._features[:, :, 0] = 1.0
        self._positions = np.log(np.arange(1.0, max_length + 1.0))
        self._features[:, :, 4] = self._positions
        self._predicted = np.zeros((capacity, max_length))
        self._pending = np.zeros(capacity, dtype=np.int64)
        # Of each request's own verified slots: sum of labels, sum of weights.
        self._labelled, self._weighed = np.zeros((2, capacity))
        self._seen = np.zeros(capacity, dtype=np.int64)
        self._sampled = np.zeros(capacity, dtype=np.int64)
        self._latest = 0
        # What is left of a request's sums, by the steps since they were last added to.
        idle = np.arange(FORGOTTEN)
        self._left = UNDRAFTED_MEMORY**idle
        self._left_once_verified = OWN_MEMORY * UNDRAFTED_MEMORY ** np.maximum(idle - 1.0, 0.0)
        # Of all requests at each regime, likewise.
        self._all = [(FIRST * FIRST_WEIGHT, FIRST_WEIGHT)] * 2
        self._own_prior = np.array(OWN_PRIOR)
        self._set_common()
        self._spread = np.repeat(np.array([RESOLUTION_PRIOR] * 2)[:, :, None], max_length, axis=2)
        self._share = self._shares()
        # Each model's weights are a row of its kind's table, one row for each regime.
        self._before_weights, self._after_weights, self._onward_weights = (
            np.array([prior, prior]) for prior in (BEFORE_PRIOR, AFTER_PRIOR, ONWARD_PRIOR)
        )
        self._by_position = self._before_weights[:, 4:5] * self._positions
        self._before = [Logistic(self._before_weights, regime) for regime in range(2)]
        self._after = [Logistic(self._after_weights, regime) for regime in range(2)]
        self._onward = [Logistic(self._onward_weights, regime) for regime in range(2)]
        self._informed = np.zeros(capacity, dtype=np.bool_)
        self._first_slots = first_slots(max_length)
        self._clock = 0
        self._verified_at = np.zeros(2)
        self._known: tuple[Ints, Floats] | None = None
        self._lessons: list[_Lesson] = []
        self._taught = 0
        self.waiting = False

    def start(self, slot: int) -> None:
        """Begin a request in `slot`: no drafts, no average of its own; it is taken to be as hot as the latest one."""
        self._pending[slot] = 0
        self._labelled[slot] = self._weighed[slot] = 0.0
        self._seen[slot] = self._clock
        self._sampled[slot] = self._latest
        self._known = None

    def standing(self, slots: Ints) -> Floats:
        """[B], logit of each request's average, less that of all requests at its temperature regime.

        The average is of the request's own verified slots, newest weighted most, shrunk toward that of all.
        """
        known = self._known
        if known is not None and (known[0] is slots or np.array_equal(known[0], slots)):
            return known[1]
        left = self._left.take(self.undrafted(slots), mode="clip")
        return self._stand(
            slots, self._labelled.take(slots) * left, self._weighed.take(slots) * left, self._sampled.take(slots)
        )

    def _stand(self, slots: Ints, labelled: Floats, weighed: Floats, sampled: Ints) -> Floats:
        """Standings of requests whose own sums are `labelled` and `weighed` by now, kept until the next step."""
        average = (labelled + self._common_prior.take(sampled)) / (weighed + self._own_prior)
        odds = logit(np.concatenate((average, self._common)), CLIP)
        standing = odds[:-2] - odds[-2:].take(sampled)
        self._known = slots, standing
        return standing

    def _set_common(self) -> None:
        """Averages of all requests at each regime, and what they weigh within a request's own."""
        self._common = np.array([labelled / weighed for labelled, weighed in self._all])
        self._common_prior = OWN_PRIOR * self._common

    def undrafted(self, slots: Ints) -> Ints:
        """[B] int64, decoding steps since each request's drafts were last verified, or since it began."""
        return self._clock - self._seen.take(slots)

    def expect(self, slots: Ints) -> tuple[Floats, Floats]:
        """Before drafting: survival of each slot, and the share of its variance that drafting resolves; both [B, L].

        Survival is the chance that this and all earlier slots are accepted. A share of 1 means that the drafter's
        confidence will tell exactly which slots survive, 0 that it tells nothing.
        """
        sampled = self._sampled.take(slots)
        survival = np.multiply.accumulate(self._before_slots(self.standing(slots), sampled), 1)
        return survival, self._share.take(sampled, 0)

    def hopeful(self, slots: Ints) -> Floats:
        """Before drafting: survival [B, L] if every slot's acceptance were one standard error above its expectation.

        The error is that of an average over all slots verified so far; old ones count less and less.
        """
        sampled = self._sampled.take(slots)
        chance = self._before_slots(self.standing(slots), sampled)
        evidence = np.array([weighed for _, weighed in self._all]) * ALL_MEMORY ** (self._clock - self._verified_at)
        chance += np.sqrt(chance * (1.0 - chance) / evidence.take(sampled)[:, None])
        return np.multiply.accumulate(np.minimum(chance, 1.0), 1)

    def drafts(self, slots: Ints) -> tuple[Floats, Ints]:
        """After drafting: survival of each drafted slot [B, L], and how many slots were drafted, [B] int64."""
        return np.multiply.accumulate(self._predicted.take(slots, 0), 1), self._pending.take(slots)

    def entropies(self, slots: Ints) -> tuple[Floats, Ints]:
        """H(q) in nats of each drafted slot [B, L], and how many slots were drafted, [B] int64."""
        return self._features[slots, :, 2] + 1.0, self._pending.take(slots)

    def tick(self) -> None:
        """One decoding step has passed."""
        self._clock += 1
        self._known = None

    def inside(self, slots: Ints) -> tuple[Floats, Floats, Floats]:
        """What a rule inside the draft loop needs: weights [B, 5] of `after` and of `onward`, standings [B]."""
        sampled = self._sampled.take(slots)
        after, onward = self._after_weights.take(sampled, 0), self._onward_weights.take(sampled, 0)
        return after, onward, self.standing(slots)

    def draft(self, slots: Ints, depth: int, top_prob: Numbers | None, entropy: Numbers | None) -> None:
        """Keep what the drafter said about the `depth` slots it has just drafted for B requests; both [B, depth].

        None where it has no distributions, and values that are not finite: then `before` stands in for `after`.
        """
        depth = min(depth, self._max_length)
        own = self.standing(slots)
        sampled = self._sampled.take(slots)
        self.waiting = True
        self._pending[slots] = depth
        rows = self._features.take(slots, 0)
        rows[:, :, 3] = own[:, None]
        informed: Bools | bool = False
        if top_prob is not None and entropy is not None:
            said = np.array((top_prob[:, :depth], entropy[:, :depth]), dtype=np.float64)
            finite = np.isfinite(said)
            informed = bool(np.count_nonzero(finite) == finite.size)
            if not informed:
                informed = np.logical_and.reduce(finite, axis=(0, 2))
                said[~finite] = 0.5
            said[0] = logit(said[0], CLIP)
            said[1] -= ONE
            rows[:, :depth, 1:3] = said.transpose(1, 2, 0)
        predicted = sigmoid(np.vecdot(rows, self._after_weights.take(sampled, 0)[:, None]))
        if informed is not True:
            predicted = np.where(np.asarray(informed)[..., None], predicted, self._before_slots(own, sampled))
        self._informed[slots] = informed
        self._features[slots] = rows
        self._predicted[slots] = predicted

    def learn(self, verification: Verification, temperature: Numbers) -> None:
        """Learn from verified slots up to and including the first rejection; temperature: [R].

        Label of a slot: accepted or not when greedy, its overlap otherwise. Slots that were drafted but not verified
        count for the average and for `before` with what `after` says of them, weighted by the chance to reach them:
        confidence chose what was verified, and without them both would believe the choice to be the rule.
        """
        slots, drafted, accepted = verification.slots, verification.drafted, verification.accepted
        overlap = verification.overlap
        sampled = self._sample(slots, temperature)
        self.waiting = False
        pending = self._pending.take(slots)
        known = pending >= np.maximum(drafted, ONE_DRAFT)
        self._pending[slots] = 0
        rows = int(np.count_nonzero(known))
        if not rows:
            return
        if rows < known.size:
            slots, drafted, accepted, sampled, pending = (
                values[known] for values in (slots, drafted, accepted, sampled, pending)
            )
            overlap = overlap[known]
        labels = self._first_slots.take(accepted, 0)
        reached = accepted + ONE_DRAFT
        real = self._first_slots.take(np.minimum(reached, drafted), 0)
        regimes = self._regimes(sampled)
        some_sampled = regimes[-1][0] > 0
        if some_sampled:
            width = min(self._max_length, overlap.shape[1])
            soft = np.minimum(np.maximum(overlap[:, :width], 0.0), 1.0)
            np.copyto(labels[:, :width], soft, where=(sampled > 0)[:, None])
            real *= np.isfinite(labels)
        weight = real
        unread = np.minimum(pending, reached) > drafted
        some_unread = np.count_nonzero(unread) > 0
        # Where the weight is 0, labels need only be finite.
        if some_sampled or some_unread:
            predicted = self._predicted.take(slots, 0)
            np.copyto(labels, predicted, where=real == 0.0)
        if some_unread:
            verified = self._first_slots.take(drafted, 0)
            reach = np.ones_like(real)
            np.multiply.accumulate(np.where(verified, 1.0, predicted)[:, :-1], 1, out=reach[:, 1:])
            drawn_only = self._first_slots.take(pending, 0) - verified
            weight = np.where(unread[:, None] & (drawn_only > 0.0), reach, real)

        left = self._left_once_verified.take(self.undrafted(slots), mode="clip")
        own_labelled, own_weighed = self._labelled.take(slots), self._weighed.take(slots)
        own_labelled *= left
        own_weighed *= left
        new_labelled, new_weighed = np.vecdot(weight, labels), np.add.reduce(weight, 1)
        own_labelled += new_labelled
        own_weighed += new_weighed
        self._labelled[slots], self._weighed[slots], self._seen[slots] = own_labelled, own_weighed, self._clock
        self._all = [(ALL_MEMORY * labelled, ALL_MEMORY * weighed) for labelled, weighed in self._all]
        for regime, mine in regimes:
            labelled, weighed = self._all[regime]
            self._all[regime] = labelled + sum(new_labelled[mine].tolist()), weighed + sum(new_weighed[mine].tolist())
            self._verified_at[regime] = self._clock
        self._set_common()
        self._stand(slots, own_labelled, own_weighed, sampled)

        features, informed = self._features.take(slots, 0), self._informed.take(slots)
        self._lessons.append(_Lesson(sampled, features, labels, weight, real, informed, pending))
        self._taught += rows
        if self._taught < EARLY or len(self._lessons) >= LESSONS:
            self._study()

    def rest(self, slots: Ints, temperature: Numbers) -> None:
        """R requests decoded without drafts, and none were waiting; temperature: [R]."""
        self._sample(slots, temperature)

    def _sample(self, slots: Ints, temperature: Numbers) -> Ints:
        sampled = temperature.astype(np.bool_).astype(np.int64)
        self._sampled[slots] = sampled
        self._latest = int(sampled[-1])
        self._known = None
        return sampled

    @staticmethod
    def _regimes(sampled: Ints) -> list[tuple[int, slice | Bools]]:
        """The regimes among `sampled` [R], each with where it is found."""
        hot = np.count_nonzero(sampled)
        if hot in (0, sampled.size):
            return [(int(hot > 0), slice(None))]
        return [(0, sampled == 0), (1, sampled == 1)]

    def _study(self) -> None:
        """Teach the models all that was gathered since the last time."""
        columns: list[np.ndarray] = [np.concatenate(column) for column in zip(*self._lessons, strict=True)]
        steps = len(self._lessons)
        self._lessons.clear()
        for regime, where in self._regimes(columns[0]):
            _, features, labels, weight, real, informed, pending = (column[where] for column in columns)
            informed = self._first_slots.take(pending, 0) * informed[:, None]
            blind = features.copy()
            blind[:, :, 1:3] = 0.0
            self._resolve(regime, features, blind, informed, steps)
            onward, reached = features.copy(), weight * informed
            onward[:, 1:, 1:3] = features[:, :-1, 1:3]
            reached[:, 0] = 0.0
            for model, x, w in (
                (self._after[regime], features, real * informed),
                (self._before[regime], blind, weight),
                (self._onward[regime], onward, reached),
            ):
                model.learn(x.reshape(-1, FEATURES), labels.reshape(-1), w.reshape(-1), steps)
        self._by_position = self._before_weights[:, 4:5] * self._positions
        self._share = self._shares()

    def _resolve(self, regime: int, features: Floats, blind: Floats, drafted: Floats, steps: int) -> None:
        """Learn how much of a survival's variance drafting resolves, from rows [N, L, 5]; drafted: [N, L], 0 or 1."""
        mean = np.multiply.accumulate(self._before[regime].predict(blind), 1)
        known = np.multiply.accumulate(self._after[regime].predict(features), 1)
        both = np.stack((np.square(known - mean), mean * (1.0 - mean)))
        both *= drafted
        self._spread[regime] = self._spread[regime] * RESOLUTION_MEMORY**steps + np.add.reduce(both, 1)

    def _shares(self) -> Floats:
        """Share of a survival's variance that drafting resolves, [2, L], for each regime."""
        return np.clip(self._spread[:, 0] / self._spread[:, 1], 0.0, 1.0)

    def _before_slots(self, own: Floats, sampled: Ints) -> Floats:
        """[B, L], each slot's acceptance given its predecessors', from standings `own` [B]."""
        weights = self._before_weights.take(sampled, 0)
        base = weights[:, 0] + weights[:, 3] * own
        return sigmoid(base[:, None] + self._by_position.take(sampled, 0))
