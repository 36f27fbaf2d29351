"""A token bucket, in which a rate limit is kept."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Bucket"]


class Bucket:
    """Holds a minute's worth of units, fills at `per_minute`, and may be overdrawn by what was not known beforehand."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.per_minute = per_minute
        self._per_s = per_minute / 60.0
        self._capacity = self._level = float(per_minute)
        self._at = clock()

    def take(self, units: float) -> None:
        """Take `units`, whether or not there are as many; a negative number gives some back."""
        self._level = min(self._capacity, self._filled() - units)

    def wait_s(self) -> float:
        """Seconds until it holds one unit; 0 where it does."""
        return max(0.0, (1.0 - self._filled()) / self._per_s)

    def _filled(self) -> float:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._per_s)
        self._at = now
        return self._level
