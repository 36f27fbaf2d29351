"""When a request whose engine went away is sent to another one, and when its client is told instead."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from dsde.engine.call import EngineDied, EnginesFull, EngineUnavailable

__all__ = ["RequestLost", "Retries", "RetryBudget"]

MAX_DEATHS = 2
"""Engines that may die with a request before it is taken for the cause."""
MAX_REFUSALS = 8
"""Times that a request may find no engine."""
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 2.0
PER_ANSWER = 0.2
PER_SECOND = 1.0


class RequestLost(Exception):
    """The request is not tried again, and the caller should not send it again either."""


class RetryBudget:
    """How many retries all requests together may still make; a fleet that fails must not be asked ever more often.

    capacity: retries that may come at once. Every answer that ends well gives back PER_ANSWER of one, every second
    PER_SECOND.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = self._left = float(capacity)
        self._clock = clock
        self._at = clock()

    def answered(self) -> None:
        """Book an answer that ended well."""
        self._left = min(self._capacity, self._left + PER_ANSWER)

    def spend(self) -> bool:
        """Take one retry; False where none is left."""
        now = self._clock()
        self._left = min(self._capacity, self._left + PER_SECOND * (now - self._at))
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Retries:
    """One request's retries. draw: random numbers from 0 to 1, which keep requests that failed together apart."""

    def __init__(self, budget: RetryBudget, draw: Callable[[], float] = random.random) -> None:
        self._budget = budget
        self._draw = draw
        self._deaths = self._refusals = 0

    def delay_s(self, error: EngineUnavailable) -> float:
        """Seconds to wait before the request is sent again after `error`.

        Raises what its client is told instead: RequestLost, EngineUnavailable, or `error` itself.
        """
        if isinstance(error, EngineDied):
            self._deaths += 1
            if self._deaths == MAX_DEATHS:
                raise RequestLost(f"{self._deaths} engines died while they had this request; it is not tried again")
        elif isinstance(error, EnginesFull) and not self._deaths:
            # Told at once, a client can go elsewhere.
            raise error
        else:
            self._refusals += 1
            if self._refusals > MAX_REFUSALS:
                raise error
        if not self._budget.spend():
            raise EngineUnavailable(f"{error}; too many requests are being tried again; send it again later")
        longest = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self._deaths + self._refusals - 1))
        return longest * (0.5 + 0.5 * self._draw())
