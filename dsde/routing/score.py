"""What it costs to send a request to each of R replicas: a pure function of arrays.

The step model is the controller's: a step of t tokens takes a + b t ms and each draft step d ms, for the whole batch. A
batch drafts as deep as brings most tokens per ms, or to a given depth. Members of one acceptance level alpha emit
1 + alpha + ... + alpha^D tokens in a step of depth D, so a batch of very different levels is slow for all of them: what
is deep enough for some makes the others wait. The loss of a choice, in ms, is the time that the request takes there and
the time that those already there lose by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ACCEPTANCE", "DEEPEST", "LEVELS", "Fleet", "Losses", "Wanted", "level", "losses"]

Array = NDArray[np.float64]

ACCEPTANCE: Array = np.array([0.1, 0.25, 0.4, 0.55, 0.68, 0.78, 0.86, 0.93])
"""The levels: requests are told apart by the one nearest to their acceptance."""
LEVELS = len(ACCEPTANCE)
DEEPEST = 8
"""Longest speculation length that is told apart."""
_EDGES = (ACCEPTANCE[1:] + ACCEPTANCE[:-1]) / 2
_DEPTHS = np.arange(DEEPEST + 1)
EMITTED: Array = (ACCEPTANCE[:, None] ** _DEPTHS).cumsum(axis=1)
"""[LEVELS, DEEPEST + 1], tokens of one request in a step of each depth."""
WORTH = 0.15
"""Chance of survival below which a draft token is not verified."""
VERIFIED: Array = np.minimum(_DEPTHS, np.ceil(np.log(WORTH) / np.log(ACCEPTANCE))[:, None])
"""[LEVELS, DEEPEST + 1], draft tokens of one request that a step of each depth verifies."""
HORIZON = 512.0
"""Tokens of an answer that count: further on, others have come and gone."""


def level(acceptance: float) -> int:
    """The level nearest to an acceptance rate."""
    return int(np.searchsorted(_EDGES, acceptance))


@dataclass(slots=True, eq=False)
class Fleet:
    """State of R replicas.

    base, token, draft: [R], a, b and d in ms. places: [R], requests that can decode together. busy: [R], ms of prompts
    still to be read. depth: [R], a fixed depth of drafting, -1 where the price decides. members: [R, LEVELS], requests
    by level, waiting ones included.

    The others follow from these, by `refresh`. emitted, time: [R, DEEPEST + 1], tokens and ms of the batch in a step of
    each depth. speed: [R, LEVELS], tokens per ms of one request of each level.
    """

    base: Array
    token: Array
    draft: Array
    places: Array
    busy: Array
    depth: Array
    members: Array
    emitted: Array
    time: Array
    speed: Array

    @classmethod
    def empty(cls, replicas: int) -> Fleet:
        """So many replicas, all at 0: each needs its costs and a `refresh`."""
        rows = [np.zeros(replicas) for _ in range(6)]
        tables = [np.zeros((replicas, width)) for width in (LEVELS, DEEPEST + 1, DEEPEST + 1, LEVELS)]
        return cls(*rows, *tables)

    def refresh(self, row: int) -> None:
        """Follow a change of one replica's members, costs, places or depth."""
        members = self.members[row]
        count = float(members.sum())
        share = min(1.0, float(self.places[row]) / count) if count > 0.0 else 1.0
        emitted = np.dot(members, EMITTED) * share
        tokens = np.dot(members, VERIFIED)
        tokens += count
        time = tokens * (share * self.token[row]) + _DEPTHS * self.draft[row]
        time += self.base[row]
        fixed = int(self.depth[row])
        depth = fixed if fixed >= 0 else int((emitted / time).argmax())
        self.emitted[row], self.time[row] = emitted, time
        self.speed[row] = EMITTED[:, depth] / time[depth]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request. output: expected tokens of its answer, at least 1. level: of its acceptance. prompt: [R], prompt
    tokens to read, those left out that a replica has cached.
    """

    output: float
    level: int
    prompt: Array


@dataclass(frozen=True, slots=True)
class Losses:
    """[R] each, ms. own: until the request has its answer. others: lost by those already there, all together."""

    own: Array
    others: Array

    @property
    def total(self) -> Array:
        """[R], what a choice costs."""
        return self.own + self.others


def losses(fleet: Fleet, wanted: Wanted) -> Losses:
    """What the request, and those already there, would lose on each replica."""
    emits, verifies = EMITTED[wanted.level], VERIFIED[wanted.level]
    count = fleet.members.sum(axis=1)
    time = fleet.time + fleet.token[:, None] * (1.0 + verifies)
    best = ((fleet.emitted + emits) / time).argmax(axis=1)
    depth = np.where(fleet.depth >= 0.0, fleet.depth, best).astype(np.intp)
    step = time[np.arange(len(time)), depth]
    prefill = fleet.token * wanted.prompt
    decode = min(wanted.output, HORIZON) * step / emits[depth]
    # Behind a full batch it waits for a place, which is held for about as long as its own answer takes.
    behind = np.maximum(0.0, count + 1.0 - fleet.places) / fleet.places
    own = fleet.busy + prefill + decode * (1.0 + behind)
    slower = 1.0 - EMITTED.T[depth] / step[:, None] / fleet.speed
    others = np.minimum(count, fleet.places) * prefill + decode * (fleet.members * slower).sum(axis=1)
    return Losses(own, others)
