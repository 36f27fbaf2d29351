"""The highest rate at which time to first token stays in bounds: double until it fails, then halve the gap."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from loadtest.drive import CANCELLED
from loadtest.profile import MOST_REQUESTS
from loadtest.records import Record

__all__ = ["LOWEST", "Found", "Probe", "bounds", "find_rate", "judge"]

LOWEST, HIGHEST = 1 / 64, 4096.0
"""Requests per second between which is searched."""
FEWEST_REQUESTS = 4
"""Requests that a probe has to expect."""
PRECISION = 1.1
"""The search ends when the lowest rate that failed is at most so many times the highest that held."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A run at one rate. p95_ttft_ms: over all its requests; infinite where more than 5 % had no first token in time.
    failed: requests with an error of the server's.
    """

    rate: float
    requests: int
    p95_ttft_ms: float
    failed: int
    holds: bool


@dataclass(frozen=True, slots=True)
class Found:
    """rate: the highest that held, None where none did. failing: the lowest that did not, None where all held."""

    rate: float | None
    failing: float | None

    @property
    def exact(self) -> bool:
        """Whether the two are as close as PRECISION asks."""
        return self.rate is not None and self.failing is not None and self.failing <= self.rate * PRECISION


def bounds(duration_s: float) -> tuple[float, float]:
    """The lowest and highest rate that a probe of `duration_s` can say something about."""
    return max(LOWEST, FEWEST_REQUESTS / duration_s), min(HIGHEST, 0.9 * MOST_REQUESTS / duration_s)


def judge(rate: float, records: list[Record], slo_ttft_ms: float) -> Probe:
    """What a run says. A request given up without a first token counts as one that never got it."""
    waits = [float("inf") if one.ttft_ms is None else one.ttft_ms for one in records]
    # The method keeps infinities apart from the values below them.
    p95 = float(np.percentile(waits, 95, method="higher")) if waits else float("inf")
    failed = sum(one.error not in (None, CANCELLED) for one in records)
    return Probe(rate, len(records), p95, failed, holds=not failed and p95 <= slo_ttft_ms)


async def find_rate(
    probe: Callable[[float], Awaitable[Probe]],
    start: float,
    out: Callable[[], bool],
    bounds: tuple[float, float] = (LOWEST, HIGHEST),
) -> Found:
    """Search from `start` requests per second, within `bounds`. out: whether there is no time for one more probe."""
    lowest, highest = bounds
    good: float | None = None
    bad: float | None = None
    rate = start
    while True:
        if (await probe(rate)).holds:
            good = rate if good is None else max(good, rate)
        else:
            bad = rate if bad is None else min(bad, rate)
        found = Found(good, bad)
        if found.exact or out():
            return found
        if bad is None:
            rate *= 2
        elif good is None:
            rate /= 2
        else:
            rate = (good * bad) ** 0.5
        if not lowest <= rate <= highest:
            return found
