"""The router without Ray: keeps the books between publications, and puts replicas in order for a request."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from dsde.routing.prefixes import Prefixes
from dsde.routing.request import BLOCK, Request
from dsde.routing.score import Fleet, Wanted, level, losses
from dsde.routing.stats import ClassStats, ReplicaStats, acceptance

__all__ = ["StabilityAware"]

R = TypeVar("R", bound=Hashable)
STALE_S = 5.0
OUTPUT = 200.0
ALPHA = 0.6
"""Tokens of an answer and acceptance that are taken for granted before anything is known."""
PRIOR = 4.0
SLOTS = 20.0
"""Requests, and draft tokens, that the wider class weighs within a narrower one."""
SLIGHT = 1e-6


@dataclass(slots=True, eq=False)
class _Sent:
    """A request on a replica: its books."""

    row: int
    level: int


class StabilityAware(Generic[R]):
    """Routes by predicted loss. Times are in seconds of any one clock."""

    def __init__(self, *, stale_s: float = STALE_S, seed: int | None = None) -> None:
        self._stale_s = stale_s
        self._random = random.Random(seed)
        self._rows: dict[R, int] = {}
        self._fleet = Fleet.empty(0)
        self._until = np.zeros(0)
        self._heard: list[float] = []
        self._stats: list[ReplicaStats | None] = []
        self._sent: dict[str, _Sent] = {}
        self._classes: dict[str, ClassStats] = {}
        self._prefixes = Prefixes()

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
        new.base[-1], new.token[-1], new.draft[-1], new.slots[-1], new.depth[-1] = 1.0, 0.01, 0.1, 32, -1
        self._fleet = new
        self._until = np.append(self._until, 0.0)
        self._heard.append(-math.inf)
        self._stats.append(None)
        new.refresh(size - 1)

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
        self._merge(before.classes if before is not None else {}, stats.classes)
        fleet.refresh(row)

    def _merge(self, before: Mapping[str, ClassStats], after: Mapping[str, ClassStats]) -> None:
        """Replace one replica's part in the sums of all."""
        for name in before.keys() | after.keys():
            was, now = before.get(name, ClassStats()), after.get(name, ClassStats())
            if was != now:
                held = self._classes.get(name, ClassStats()).plus(now).plus(was, -1.0)
                if held.requests > SLIGHT:
                    self._classes[name] = held
                else:
                    self._classes.pop(name, None)

    def _expect(self, request: Request) -> tuple[float, float]:
        """(answer tokens, acceptance) of its narrowest class, each shrunk toward the next wider one."""
        output, accepted = min(OUTPUT, request.max_tokens / 2), ALPHA
        for name in reversed(request.classes):
            one = self._classes.get(name)
            if one is None:
                continue
            output = (one.output + PRIOR * output) / (one.requests + PRIOR)
            accepted = acceptance(one.steps + SLOTS, one.drafted + SLOTS, one.accepted + SLOTS * accepted)
        return min(output, request.max_tokens), accepted

    def choose(self, request: Request, candidates: Sequence[R], now: float) -> list[R]:
        rows = [self._rows[one] for one in candidates]
        fresh = sum(now - self._heard[row] <= self._stale_s for row in rows)
        if fresh * 2 < len(rows):
            pair = self._random.sample(range(len(rows)), min(2, len(rows)))
            pair.sort(key=lambda i: self._fleet.members[rows[i]].sum())
            return [candidates[i] for i in pair]
        loss = losses(self._fleet, self._wanted(request, now)).total.tolist()
        order = sorted(range(len(rows)), key=lambda i: loss[rows[i]])
        return [candidates[i] for i in order]

    def _wanted(self, request: Request, now: float) -> Wanted:
        output, acceptance = self._expect(request)
        np.maximum(self._until - now, 0.0, out=self._fleet.busy)
        self._fleet.busy *= 1e3
        prompt = np.full(len(self._heard), float(request.prompt_tokens))
        for row, count in self._prefixes.matched(request.blocks).items():
            prompt[row] -= count * BLOCK
        return Wanted(output, level(acceptance), prompt)

    def routed(self, number: str, request: Request, replica: R, now: float) -> None:
        row = self._rows[replica]
        wanted = self._wanted(request, now)
        fleet = self._fleet
        self._sent[number] = _Sent(row, wanted.level)
        fleet.members[row, wanted.level] += 1.0
        self._until[row] = max(self._until[row], now) + 1e-3 * fleet.token[row] * wanted.prompt[row]
        self._prefixes.sent(request.blocks, row)
        fleet.refresh(row)

    def completed(self, number: str, now: float) -> None:
        one = self._sent.pop(number, None)
        if one is None:
            return
        self._fleet.members[one.row, one.level] -= 1.0
        self._fleet.refresh(one.row)
