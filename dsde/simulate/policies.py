"""The routers that are compared. Each sees what it would see in Serve: its own bookkeeping, and publications."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dsde.routing.choice import StabilityAware
from dsde.routing.request import BLOCK, Request
from dsde.routing.stats import ReplicaStats

__all__ = ["POLICIES", "Router", "two_random"]

IMBALANCE = 10
"""Difference of queue lengths up to which prefix affinity looks for a prefix."""
MATCH = 0.1
"""Share of the prompt that must be cached for prefix affinity to follow it."""
REMEMBERED = 4096


class Router(Protocol):
    """One router of a deployment; replicas are numbers."""

    def choose(self, number: int, request: Request, open_replicas: Sequence[int], now: float) -> int:
        """The replica that takes the request, out of those with room. now: seconds."""

    def routed(self, number: int, request: Request, replica: int, now: float) -> None:
        """Request `number` went to `replica`."""

    def completed(self, number: int, replica: int, now: float) -> None:
        """It has ended."""

    def published(self, replica: int, stats: ReplicaStats, now: float) -> None:
        """A publication has arrived."""


class _Counting:
    """Knows how many requests each replica has, as Serve's cache of queue lengths does."""

    def __init__(self, replicas: int, seed: int) -> None:
        self.queued = [0] * replicas
        self.random = random.Random(seed)

    def routed(self, number: int, request: Request, replica: int, now: float) -> None:
        self.queued[replica] += 1

    def completed(self, number: int, replica: int, now: float) -> None:
        self.queued[replica] -= 1

    def published(self, replica: int, stats: ReplicaStats, now: float) -> None:
        pass


class _RoundRobin(_Counting):
    _next = 0

    def choose(self, number: int, request: Request, open_replicas: Sequence[int], now: float) -> int:
        self._next += 1
        return open_replicas[self._next % len(open_replicas)]


class _TwoRandomChoices(_Counting):
    def choose(self, number: int, request: Request, open_replicas: Sequence[int], now: float) -> int:
        return two_random(self.random, open_replicas, self.queued)


class _ShortestQueue(_Counting):
    def choose(self, number: int, request: Request, open_replicas: Sequence[int], now: float) -> int:
        fewest = min(self.queued[r] for r in open_replicas)
        return self.random.choice([r for r in open_replicas if self.queued[r] == fewest])


class _PrefixAffinity(_Counting):
    """Follows the longest prefix while queues are about equal, as Ray's PrefixCacheAffinityRouter does by default."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self._prefixes: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]

    def choose(self, number: int, request: Request, open_replicas: Sequence[int], now: float) -> int:
        queued = [self.queued[r] for r in open_replicas]
        if max(queued) - min(queued) > IMBALANCE:
            return two_random(self.random, open_replicas, self.queued)
        matched = {r: self._matched(request, r) for r in open_replicas}
        best = max(matched.values())
        if best * BLOCK < MATCH * request.prompt_tokens:
            smallest = min(len(self._prefixes[r]) for r in open_replicas)
            return self.random.choice([r for r in open_replicas if len(self._prefixes[r]) == smallest])
        return self.random.choice([r for r in open_replicas if matched[r] == best])

    def routed(self, number: int, request: Request, replica: int, now: float) -> None:
        super().routed(number, request, replica, now)
        known = self._prefixes[replica]
        for block in request.blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > REMEMBERED:
            known.popitem(last=False)

    def _matched(self, request: Request, replica: int) -> int:
        known = self._prefixes[replica]
        return next((n for n, block in enumerate(request.blocks) if block not in known), len(request.blocks))


class _StabilityAware(_Counting):
    """The router that serves."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self._router = StabilityAware[int](seed=seed)
        for replica in range(replicas):
            self._router.add(replica)

    def choose(self, number: int, request: Request, open_replicas: Sequence[int], now: float) -> int:
        best, *_ = self._router.choose(str(number), request, open_replicas, now)
        return min(best, key=self.queued.__getitem__)

    def routed(self, number: int, request: Request, replica: int, now: float) -> None:
        super().routed(number, request, replica, now)
        self._router.routed(str(number), request, replica, now)

    def completed(self, number: int, replica: int, now: float) -> None:
        super().completed(number, replica, now)
        self._router.completed(str(number), replica)

    def published(self, replica: int, stats: ReplicaStats, now: float) -> None:
        self._router.published(replica, stats, now)


POLICIES: Mapping[str, Callable[[int, int], Router]] = {
    "stability_aware": _StabilityAware,
    "two_random_choices": _TwoRandomChoices,
    "round_robin": _RoundRobin,
    "shortest_queue": _ShortestQueue,
    "prefix_affinity": _PrefixAffinity,
}


def two_random(source: random.Random, open_replicas: Sequence[int], queued: Sequence[int]) -> int:
    """Of two replicas drawn at random the one with the shorter queue."""
    pair = source.sample(open_replicas, min(2, len(open_replicas)))
    return min(pair, key=queued.__getitem__)
