"""What it costs to send a request to each of R replicas: a pure function of arrays.

The step model is the controller's: a step of t tokens takes a + b t ms and each draft step d ms, for the whole batch. A
batch drafts as deep as brings most tokens per ms, or to a given depth. Members of one acceptance level alpha emit
1 + alpha + ... + alpha^D tokens in a step of depth D, so a batch of very different levels is slow for all of them: what
is deep enough for some makes the others wait. The loss of a choice, in ms, is the time the request takes there and the
time that those already there lose by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["DEEPEST", "LEVELS", "Fleet", "Losses", "Wanted", "level", "losses"]

Array = NDArray[np.float64]

ACCEPTANCE: Array = np.array([0.1, 0.25, 0.4, 0.55, 0.68, 0.78, 0.86, 0.93])
LEVELS = len(ACCEPTANCE)
_EDGES = (ACCEPTANCE[1:] + ACCEPTANCE[:-1]) / 2
DEEPEST = 8
_DEPTHS = np.arange(DEEPEST + 1)
EMITTED: Array = (ACCEPTANCE[:, None] ** _DEPTHS).cumsum(axis=1)
"""[LEVELS, DEEPEST + 1], tokens of one request in a step."""
WORTH = 0.15
"""Share of a step's verified drafts below which a level drafts no deeper: a bound on what is verified in vain."""
VERIFIED: Array = np.minimum(_DEPTHS, np.ceil(np.log(WORTH) / np.log(ACCEPTANCE))[:, None])
"""[LEVELS, DEEPEST + 1], draft tokens of one request in a step."""

HORIZON = 128.0
"""Tokens of an answer that count: by then others have come and gone, and the router has levelled the replicas."""
HARM = 1.0
KV_FULL = 0.9
"""Use of the KV cache above which a replica has to evict."""


def level(acceptance: float) -> int:
    """The level nearest to an acceptance rate."""
    return int(np.searchsorted(_EDGES, acceptance))


@dataclass(slots=True, eq=False)
class Fleet:
    """State of R replicas, [R] each but for the last three. base, token, draft: a, b and d in ms. slots: requests that
    decode together. busy: ms of prompts still to be read. elsewhere: requests that other routers sent. depth: fixed
    depth of drafting, -1 where the price decides. kv_use: share of the KV cache in use.

    members: [R, LEVELS], requests by acceptance level. emitted, tokens: [R, DEEPEST + 1], of the batch in a step of
    each depth; both follow from members, see `refresh`. speed: [R, LEVELS], tokens per ms of one request of a level.
    """

    base: Array
    token: Array
    draft: Array
    slots: Array
    busy: Array
    depth: Array
    kv_use: Array
    members: Array
    emitted: Array
    time: Array
    speed: Array

    @classmethod
    def empty(cls, replicas: int) -> Fleet:
        """So many replicas without requests or costs."""
        one, depths, levels = replicas, (replicas, DEEPEST + 1), (replicas, LEVELS)
        rows = [np.zeros(one) for _ in range(7)]
        return cls(*rows, np.zeros(levels), np.zeros(depths), np.zeros(depths), np.zeros(levels))

    def refresh(self, row: int) -> None:
        """Work out emitted, time and speed of one replica after a change of its members or costs."""
        members = self.members[row]
        count = members.sum()
        share = min(1.0, self.slots[row] / count) if count else 1.0
        decoding = members * share
        emitted = np.dot(decoding, EMITTED)
        verified = np.dot(decoding, VERIFIED)
        time = self.base[row] + self.token[row] * (count * share + verified) + self.draft[row] * _DEPTHS
        best = int(self.depth[row]) if self.depth[row] >= 0 else int((emitted / time).argmax())
        self.emitted[row], self.time[row] = emitted, time
        self.speed[row] = EMITTED[:, best] / time[best]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request. output: expected tokens of its answer. level: of its acceptance. prompt: tokens to read, [R], those
    that a replica has cached left out.
    """

    output: float
    level: int
    prompt: Array


@dataclass(frozen=True, slots=True)
class Losses:
    """[R] each, ms. own: until the request has finished. others: lost by those already there, all together."""

    own: Array
    others: Array

    @property
    def total(self) -> Array:
        """[R], what to minimise."""
        return self.own + HARM * self.others


def losses(fleet: Fleet, wanted: Wanted) -> Losses:
    """What each replica would lose by this request."""
    rows = np.arange(len(fleet.base))
    emits, verifies = EMITTED[wanted.level], VERIFIED[wanted.level]
    count = fleet.members.sum(axis=1)
    emitted = fleet.emitted + emits
    time = fleet.time + fleet.token[:, None] * (1.0 + verifies)
    best = (emitted / time).argmax(axis=1)
    best = np.where(fleet.depth >= 0, fleet.depth, best).astype(np.intp)
    step = time[rows, best]
    prefill = fleet.token * wanted.prompt
    decode = min(wanted.output, HORIZON) * step / emits[best]
    # Behind a full batch it waits for places: each is held for about as long as its own answer takes.
    behind = np.maximum(0.0, count + 1.0 - fleet.slots) / fleet.slots
    own = fleet.busy + prefill + decode * (1.0 + behind)
    slower = 1.0 - EMITTED[:, best].T / step[:, None] / fleet.speed
    others = np.minimum(count, fleet.slots) * prefill + decode * (fleet.members * slower).sum(axis=1)
    return Losses(own, others)
