"""Tells an engine that is stuck from one that has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["StepDeadline"]


class StepDeadline:
    """Watches that an engine with requests makes steps. timeout_s: the longest that one may take."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._steps = 0
        self._since = clock()

    def overdue(self, steps: int, unfinished: int) -> bool:
        """Whether the engine is stuck. steps: those it has made since its start. unfinished: requests it has.

        It must be asked more often than the deadline is long: what lies between two questions counts as no step.
        """
        now = self._clock()
        if steps != self._steps or not unfinished:
            self._steps, self._since = steps, now
        return now - self._since > self._timeout_s
