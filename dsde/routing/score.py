"""What it costs to send a request to each of R replicas: a pure function of arrays.

The step model is the controller's: a step of t tokens takes a + b t ms, a draft step d ms, and a batch drafts as deep as
its longest member. A request's loss is its own time to finish and the time it takes from those already there, each
weighted by how long the answer is: who waits longest anyway counts most, which is what shortens the tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BUCKETS", "STEPS", "Fleet", "Wanted", "bucket", "losses"]

Array = NDArray[np.float64]

BUCKETS = 12
STEPS: Array = 2.0 ** np.arange(BUCKETS)
"""Remaining decoding steps that a bucket stands for: 1 to 2048."""
LEVELS = 8


def bucket(steps: float) -> int:
    """The bucket of a request with so many steps to go."""
    return max(0, min(BUCKETS - 1, round(float(np.log2(max(1.0, steps))))))


@dataclass(slots=True, eq=False)
class Fleet:
    """State of R replicas. base, token, draft: [R], a, b and d in ms. slots: [R], requests that decode together.

    queued: [R], requests there, waiting ones included. tokens: [R], tokens that one of them has verified per step.
    steps: [R, BUCKETS], requests by remaining steps. weight: [R, BUCKETS], the sum of their weights. depth: [R], draft
    steps of the batch. busy: [R], ms of prompts still to be read.
    """

    base: Array
    token: Array
    draft: Array
    slots: Array
    queued: Array
    tokens: Array
    steps: Array
    weight: Array
    depth: Array
    busy: Array

    @classmethod
    def empty(cls, replicas: int) -> Fleet:
        """So many replicas without requests."""
        rows = [np.zeros(replicas) for _ in range(6)]
        return cls(*rows, np.zeros((replicas, BUCKETS)), np.zeros((replicas, BUCKETS)), np.zeros(replicas), np.zeros(replicas))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request. steps: expected decoding steps. weight: of its own time. tokens: it has verified per step. length:
    speculation length it is likely to get. prompt: tokens to read, [R] or a number, those in a replica's cache left out.
    """

    steps: float
    weight: float
    tokens: float
    length: float
    prompt: Array | float


def losses(fleet: Fleet, wanted: Wanted) -> Array:
    """[R], weighted ms lost by the request and by those already there."""
    together = np.minimum(STEPS, wanted.steps)
    meeting = fleet.steps @ together
    harmed = fleet.weight @ together
    prefill = fleet.token * wanted.prompt
    over = np.maximum(0.0, fleet.queued + 1.0 - fleet.slots)
    deeper = np.maximum(0.0, wanted.length - fleet.depth)
    depth = fleet.depth + deeper
    step = fleet.base + depth * fleet.draft
    own = fleet.busy + prefill + wanted.steps * (step + fleet.token * wanted.tokens) + fleet.token * fleet.tokens * meeting
    mean = meeting / np.maximum(1.0, fleet.queued)
    own += over * mean / fleet.slots * (step + fleet.token * fleet.tokens * fleet.slots)
    others = prefill * fleet.weight.sum(axis=1) + harmed * (fleet.token * wanted.tokens + deeper * fleet.draft)
    return wanted.weight * own + others
