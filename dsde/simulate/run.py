"""The simulation: events in order of time, one router, N replicas, one list of arrivals for every policy."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from dsde.control.replay import StepCosts
from dsde.simulate.policies import POLICIES
from dsde.simulate.replica import Engine, Lengths, Replica
from dsde.simulate.workload import MIXES, Group, arrivals

__all__ = ["Figures", "Scenario", "Setting", "simulate"]

ENGINE = Engine()
WARMUP = 0.1
"""Share of the requests, the first ones, whose latency does not count."""
PUBLICATION_S = 1.0
DELIVERY_S = 0.15
"""Between two publications of a replica, give or take a tenth, and from there to the router."""
MAX_ONGOING = 64
"""Requests that a replica takes, waiting ones included; more wait at the router."""
SATURATED = 400
"""Requests of the closed loop that measures a replica's capacity."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated. load: share of what the replicas can complete when they are always full."""

    replicas: int
    load: float
    mix: str
    requests: int
    seed: int
    costs: StepCosts
    engine: Engine = ENGINE


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy. p50_ms, p99_ms, mean_ms: from a request's arrival to its last token. straggler_share: of the time
    that requests decoded, what they waited for longer members of their batch.
    """

    p50_ms: float
    p99_ms: float
    mean_ms: float
    tokens_per_s: float
    straggler_share: float

    def to_dict(self) -> dict[str, float]:
        """As JSON, four digits."""
        return {name: float(f"{getattr(self, name):.4g}") for name in self.__dataclass_fields__}


class Scenario:
    """What all policies are sent, and how long the modelled machines take for it."""

    def __init__(self, setting: Setting, recorded: list[Group]) -> None:
        self.setting, self.recorded = setting, recorded
        self._lengths = Lengths(recorded, setting.costs, setting.engine.longest)
        slowest = MIXES[setting.mix].slowest
        self._speeds = [1.0] * (setting.replicas - 1) + [slowest]
        self.arrivals = arrivals(MIXES[setting.mix], recorded, setting.requests, setting.seed)
        self.rate = setting.load * self._capacity() * sum(self._speeds)

    def replicas(self) -> list[Replica]:
        """The machines, idle."""
        return [self._replica(speed) for speed in self._speeds]

    def _replica(self, speed: float) -> Replica:
        return Replica(self.setting.engine, self.setting.costs, self._lengths, len(self.recorded), speed)

    def _capacity(self) -> float:
        """Requests per ms that one replica of full speed completes when its batch is always full."""
        replica = self._replica(1.0)
        replica.waiting.extend(arrivals(MIXES[self.setting.mix], self.recorded, SATURATED, self.setting.seed))
        clock, done, measured = 0.0, 0, (0.0, 0)
        while len(replica.waiting) > 1:
            clock += replica.begin()
            done += len(replica.end())
            if done < self.setting.engine.slots:
                measured = clock, done
        return (done - measured[1]) / (clock - measured[0])


def simulate(policy: str, scenario: Scenario) -> Figures:
    """Run one policy; the same scenario gives the same figures."""
    return _Run(policy, scenario).figures()


class _Run:
    def __init__(self, policy: str, scenario: Scenario) -> None:
        setting = scenario.setting
        self.replicas = scenario.replicas()
        self._router = POLICIES[policy](setting.replicas, setting.seed)
        self._arrivals, self._rate = scenario.arrivals, scenario.rate
        self._ongoing = [0] * setting.replicas
        self._open = list(range(setting.replicas))
        self._queue: deque[int] = deque()
        self._latency: list[float] = [0.0] * len(self._arrivals)
        self._random = random.Random(setting.seed + 1)
        self._last = 0.0

    def figures(self) -> Figures:
        events: list[tuple[float, int, int, Any]] = [
            (a.time / self._rate, 0, n, None) for n, a in enumerate(self._arrivals)
        ]
        events += [(self._random.uniform(0, 1e3 * PUBLICATION_S), 2, r, None) for r in range(len(self.replicas))]
        heapq.heapify(events)
        self._events = events
        left = len(self._arrivals)
        while left:
            now, what, which, value = heapq.heappop(events)
            if what == 0:
                self._route(which, now)
            elif what == 1:
                left -= self._ended(which, now)
            elif what == 2:
                delivery = now + 1e3 * DELIVERY_S
                heapq.heappush(events, (delivery, 3, which, self.replicas[which].stats()))
                again = now + 1e3 * PUBLICATION_S * self._random.uniform(0.9, 1.1)
                heapq.heappush(events, (again, 2, which, None))
            else:
                self._router.published(which, value, now / 1e3)
        counted = [replica.counted for replica in self.replicas]
        latency = sorted(self._latency[int(WARMUP * len(self._latency)) :])
        decoded = sum(one.decoded for one in counted)
        return Figures(
            p50_ms=latency[len(latency) // 2],
            p99_ms=latency[min(len(latency) - 1, int(0.99 * len(latency)))],
            mean_ms=sum(latency) / len(latency),
            tokens_per_s=1e3 * sum(one.tokens for one in counted) / self._last,
            straggler_share=sum(one.waited for one in counted) / decoded if decoded else 0.0,
        )

    def _route(self, number: int, now: float) -> None:
        if not self._open:
            self._queue.append(number)
            return
        arrival = self._arrivals[number]
        chosen = self._router.choose(number, arrival.request, self._open, now / 1e3)
        self._router.routed(number, arrival.request, chosen, now / 1e3)
        self._ongoing[chosen] += 1
        if self._ongoing[chosen] >= MAX_ONGOING:
            self._open.remove(chosen)
        replica = self.replicas[chosen]
        replica.waiting.append(arrival)
        if not replica.stepping:
            self._step(chosen, now)

    def _step(self, which: int, now: float) -> None:
        replica = self.replicas[which]
        replica.stepping = replica.busy
        if replica.stepping:
            heapq.heappush(self._events, (now + replica.begin(), 1, which, None))

    def _ended(self, which: int, now: float) -> int:
        finished = self.replicas[which].end()
        for arrival in finished:
            self._latency[arrival.number] = now - arrival.time / self._rate
            self._router.completed(arrival.number, which, now / 1e3)
            self._ongoing[which] -= 1
            self._last = now
            if self._ongoing[which] == MAX_ONGOING - 1:
                self._open.append(which)
                self._open.sort()
        self._step(which, now)
        for _ in range(min(len(self._queue), len(finished))):
            self._route(self._queue.popleft(), now)
        return len(finished)
