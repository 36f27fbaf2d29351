"""Sums over the newest seconds, for gauges that say how things are now."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

__all__ = ["Window"]


class Window:
    """Named sums in bins of one second; the newest `seconds` bins that got anything are kept, so memory is fixed."""

    def __init__(self, seconds: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._start = clock()
        self._bins: deque[tuple[int, Counter[str]]] = deque(maxlen=seconds)
        self._lock = threading.Lock()

    def add(self, amounts: Mapping[str, float]) -> None:
        """Add `amounts` to the bin of this second."""
        second = int(self._clock())
        with self._lock:
            if not self._bins or self._bins[-1][0] != second:
                self._bins.append((second, Counter()))
            sums = self._bins[-1][1]
            for name, amount in amounts.items():
                sums[name] += amount  # type: ignore[assignment]

    def rate(self, name: str) -> float:
        """`name` per second over the newest `seconds`, 0 when nothing happened in them."""
        now = self._clock()
        with self._lock:
            total = sum(sums[name] for second, sums in self._bins if second > now - self._seconds)
        return total / max(1.0, min(float(self._seconds), now - self._start))

    def ratio(self, part: str, whole: str) -> float | None:
        """Sum of `part` over sum of `whole` in the bins that are kept, however old; None without a `whole`."""
        with self._lock:
            below = sum(sums[whole] for _, sums in self._bins)
            above = sum(sums[part] for _, sums in self._bins)
        return above / below if below else None
