"""What it costs to send a request to each of R replicas: a pure function of arrays.

The step model is the controller's: a step of t tokens takes a + b t ms and each draft step d ms, for the whole batch. A
batch drafts as deep as brings most tokens per ms, or to a given depth. Members of one acceptance level alpha emit
1 + alpha + ... + alpha^D tokens in a step of depth D, so a batch of very different levels is slow for all of them: what
is deep enough for some makes the others wait. The loss of a choice, in ms, is the time that the request takes there and
the time that those already there lose by it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ACCEPTANCE", "DEEPEST", "LEVELS", "Array", "Fleet", "Losses", "Wanted", "level", "losses"]

Array = NDArray[np.float64]

ACCEPTANCE: Array = np.array([0.1, 0.25, 0.4, 0.55, 0.68, 0.78, 0.86, 0.93])
"""The levels: requests are told apart by the one nearest to their acceptance."""
LEVELS = len(ACCEPTANCE)
DEEPEST = 8
"""Longest speculation length that is told apart."""
_EDGES = ((ACCEPTANCE[1:] + ACCEPTANCE[:-1]) / 2).tolist()
_DEPTHS = np.arange(DEEPEST + 1)
EMITTED: Array = (ACCEPTANCE[:, None] ** _DEPTHS).cumsum(axis=1)
"""[LEVELS, DEEPEST + 1], tokens of one request in a step of each depth."""
_BY_DEPTH = np.ascontiguousarray(EMITTED.T)
WORTH = 0.15
"""Chance of survival below which a draft token is not verified."""
VERIFIED: Array = np.minimum(_DEPTHS, np.ceil(np.log(WORTH) / np.log(ACCEPTANCE))[:, None])
"""[LEVELS, DEEPEST + 1], draft tokens of one request that a step of each depth verifies."""
_TOKENS = 1.0 + VERIFIED
_BOTH = np.hstack((EMITTED, _TOKENS))
HORIZON = 512.0
"""Tokens of an answer that count: further on, others have come and gone."""


def level(acceptance: float) -> int:
    """The level nearest to an acceptance rate."""
    return bisect_left(_EDGES, acceptance)


@dataclass(slots=True, eq=False)
class Fleet:
    """State of R replicas.

    base, token, draft, prompt: [R], a, b, d, and one prompt token, in ms. places: [R], requests that can decode
    together. busy: [R], ms of prompts still to be read. depth: [R], a fixed depth of drafting, -1 where the price
    decides. members: [R, LEVELS], requests by level, waiting ones included.

    The others follow from these, by `refresh`. count: [R], all members. decoding: [R], those that have a place. turns:
    [R], the time one more would take, as a multiple of what it takes with a place. emitted, time: [R, DEEPEST + 1],
    tokens and ms of the batch in a step of each depth. pace: [R, LEVELS], ms per token of all members of each level.
    """

    base: Array
    token: Array
    draft: Array
    prompt: Array
    places: Array
    busy: Array
    depth: Array
    count: Array
    decoding: Array
    turns: Array
    members: Array
    emitted: Array
    time: Array
    pace: Array

    @classmethod
    def empty(cls, replicas: int) -> Fleet:
        """So many replicas, all at 0: each needs its costs and a `refresh`."""
        widths = (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, LEVELS, DEEPEST + 1, DEEPEST + 1, LEVELS)
        return cls(*(np.zeros(replicas) if width == 1 else np.zeros((replicas, width)) for width in widths))

    def refresh(self, row: int) -> None:
        """Follow a change of one replica's members, costs, places or depth."""
        members = self.members[row]
        count, places = float(members.sum()), float(self.places[row])
        decoding = min(count, places)
        share = decoding / count if count > 0.0 else 1.0
        both = np.dot(members, _BOTH)
        both *= share
        emitted, time = both[: DEEPEST + 1], both[DEEPEST + 1 :]
        time *= self.token[row]
        time += self.base[row] + _DEPTHS * self.draft[row]
        depth = int(self.depth[row])
        if depth < 0:
            depth = int((emitted / time).argmax())
        else:
            # No other depth is ever the best.
            time[:depth] = time[depth + 1 :] = np.inf
        self.count[row], self.decoding[row] = count, decoding
        # Behind a full batch it waits for a place, which is held for about as long as its own answer takes.
        self.turns[row] = 1.0 + max(0.0, count + 1.0 - places) / places
        self.emitted[row], self.time[row] = emitted, time
        self.pace[row] = members * (time[depth] / EMITTED[:, depth])


@dataclass(slots=True)
class Wanted:
    """The request. output: expected tokens of its answer, at least 1. level: of its acceptance. prompt: [R], prompt
    tokens to read, those left out that a replica has cached.
    """

    output: float
    level: int
    prompt: Array


@dataclass(slots=True)
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
    emits = EMITTED[wanted.level]
    time = fleet.token[:, None] * _TOKENS[wanted.level]
    time += fleet.time
    depth = ((fleet.emitted + emits) / time).argmax(axis=1)
    step = time[np.arange(len(time)), depth]
    prefill = fleet.prompt * wanted.prompt
    decode = min(wanted.output, HORIZON) * step / emits.take(depth)
    own = fleet.busy + prefill + decode * fleet.turns
    # A member keeps the share (its ms per token before) / (its ms per token now) of its speed.
    kept = np.vecdot(fleet.pace, _BY_DEPTH.take(depth, axis=0)) / step
    others = fleet.decoding * prefill + decode * (fleet.count - kept)
    return Losses(own, others)
