"""The router without Ray: keeps the books between publications, and puts replicas in order for a request."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from dsde.routing.prefixes import Prefixes
from dsde.routing.request import BLOCK, Request
from dsde.routing.score import STEPS, Fleet, Wanted, bucket, losses
from dsde.routing.stats import ClassStats, ReplicaStats

__all__ = ["StabilityAware"]

R = TypeVar("R", bound=Hashable)
STALE_S = 5.0
PRIOR = 4.0
TAIL = 1.0


@dataclass(slots=True, eq=False)
class _Sent:
    """A request on a replica: its books."""

    row: int
    at: float
    steps: float
    weight: float
    length: float
    bucket: int


class StabilityAware(Generic[R]):
    """Routes by predicted loss. Times are in seconds of any one clock."""

    def __init__(self, *, stale_s: float = STALE_S, seed: int | None = None) -> None:
        self._stale_s = stale_s
        self._random = random.Random(seed)
        self._rows: dict[R, int] = {}
        self._free: list[int] = []
        self._fleet = Fleet.empty(0)
        self._until = np.zeros(0)
        self._heard: list[float] = []
        self._stats: list[ReplicaStats | None] = []
        self._sent: dict[str, _Sent] = {}
        self._on: list[dict[str, _Sent]] = []
        self._classes: dict[str, ClassStats] = {}
        self._prefixes = Prefixes()
        self._mean_steps = 100.0

    def add(self, replica: R) -> None:
        if replica in self._rows:
            return
        row = len(self._heard)
        self._rows[replica] = row
        self._grow()

    def _grow(self) -> None:
        size = len(self._heard) + 1
        old, new = self._fleet, Fleet.empty(size)
        for name in Fleet.__slots__:
            getattr(new, name)[: size - 1] = getattr(old, name)
        new.base[-1], new.token[-1], new.draft[-1], new.slots[-1], new.tokens[-1] = 1.0, 0.01, 0.1, 32, 1.0
        self._fleet = new
        self._until = np.append(self._until, 0.0)
        self._heard.append(-math.inf)
        self._stats.append(None)
        self._on.append({})

    def published(self, replica: R, stats: ReplicaStats, now: float) -> None:
        row = self._rows[replica]
        before = self._stats[row]
        if before is not None and before.number == stats.number:
            return
        self._stats[row], self._heard[row] = stats, now
        fleet = self._fleet
        if stats.verify_ms is not None:
            fleet.base[row], fleet.token[row] = stats.verify_ms
        if stats.draft_ms is not None:
            fleet.draft[row] = stats.draft_ms
        fleet.slots[row] = stats.slots
        fleet.tokens[row] = 1.0 + stats.length
        for name, one in (before.classes if before else {}).items():
            self._classes[name] = self._classes[name] - one
        for name, one in stats.classes.items():
            self._classes[name] = self._classes.get(name, ClassStats()) + one
        self._recount(row, now)

    def _recount(self, row: int, now: float) -> None:
        """Remaining steps of what is there, by the time that has passed."""
        fleet = self._fleet
        fleet.steps[row] = fleet.weight[row] = 0.0
        n = len(self._on[row])
        step = fleet.base[row] + fleet.token[row] * fleet.tokens[row] * min(n, fleet.slots[row]) + fleet.depth[row] * fleet.draft[row]
        for one in self._on[row].values():
            done = 1e3 * (now - one.at) / step
            one.bucket = bucket(max(one.steps - done, 0.35 * one.steps))
            fleet.steps[row, one.bucket] += 1.0
            fleet.weight[row, one.bucket] += one.weight
        self._deepen(row)

    def _deepen(self, row: int) -> None:
        self._fleet.depth[row] = max((one.length for one in self._on[row].values()), default=0.0)

    def _expect(self, request: Request) -> tuple[float, float, float]:
        """(answer tokens, tokens per step, acceptance), classes narrow first, shrunk toward the wider."""
        output, per_step, acceptance = min(200.0, request.max_tokens / 2), 1.0, 0.6
        for name in reversed(request.classes):
            one = self._classes.get(name)
            if one is None or one.requests < 0.5:
                continue
            output = (one.output + PRIOR * output) / (one.requests + PRIOR)
            if one.steps > 0:
                per_step = (one.tokens + PRIOR * 50 * per_step) / (one.steps + PRIOR * 50)
            acceptance = (one.accepted + 20 * acceptance) / (one.drafted + 20)
        return min(output, request.max_tokens), per_step, acceptance

    def choose(self, request: Request, candidates: Sequence[R], now: float) -> list[R]:
        rows = [self._rows[one] for one in candidates]
        fresh = sum(now - self._heard[row] <= self._stale_s for row in rows)
        if fresh * 2 < len(rows):
            pair = self._random.sample(range(len(rows)), min(2, len(rows)))
            pair.sort(key=lambda i: self._fleet.queued[rows[i]])
            return [candidates[i] for i in pair]
        wanted = self._wanted(request, now)
        loss = losses(self._fleet, wanted)
        order = sorted(range(len(rows)), key=lambda i: loss[rows[i]])
        return [candidates[i] for i in order]

    def _wanted(self, request: Request, now: float) -> Wanted:
        output, per_step, acceptance = self._expect(request)
        steps = max(1.0, output / per_step)
        np.maximum(self._until - now, 0.0, out=self._fleet.busy)
        self._fleet.busy *= 1e3
        prompt = np.full(len(self._heard), float(request.prompt_tokens))
        for row, count in self._prefixes.matched(request.blocks).items():
            prompt[row] -= count * BLOCK
        length = self._length(acceptance)
        weight = (steps / self._mean_steps) ** TAIL
        return Wanted(steps, weight, 1.0 + length, length, prompt)

    def _length(self, acceptance: float) -> float:
        fleet = self._fleet
        n = fleet.queued.mean() + 1
        a, b = fleet.base.mean(), fleet.token.mean()
        threshold = b * n / (a + b * n)
        return max(0.0, min(8.0, math.log(max(threshold, 1e-3)) / math.log(min(0.99, max(acceptance, 0.05)))))

    def routed(self, number: str, request: Request, replica: R, now: float) -> None:
        row = self._rows[replica]
        wanted = self._wanted(request, now)
        fleet = self._fleet
        one = _Sent(row, now, wanted.steps, wanted.weight, wanted.length, bucket(wanted.steps))
        self._sent[number] = self._on[row][number] = one
        fleet.queued[row] += 1.0
        fleet.steps[row, one.bucket] += 1.0
        fleet.weight[row, one.bucket] += one.weight
        fleet.depth[row] = max(fleet.depth[row], one.length)
        self._until[row] = max(self._until[row], now) + 1e-3 * fleet.token[row] * wanted.prompt[row]
        self._prefixes.sent(request.blocks, row)
        self._mean_steps += 0.01 * (wanted.steps - self._mean_steps)

    def completed(self, number: str, now: float) -> None:
        one = self._sent.pop(number, None)
        if one is None:
            return
        fleet, row = self._fleet, one.row
        del self._on[row][number]
        fleet.queued[row] -= 1.0
        fleet.steps[row, one.bucket] -= 1.0
        fleet.weight[row, one.bucket] -= one.weight
        self._deepen(row)
