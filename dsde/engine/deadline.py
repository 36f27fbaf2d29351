"""Tells an engine that is stuck from one that has nothing to do, and ends one that does not come up."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from types import TracebackType

import psutil

__all__ = ["StartDeadline", "StepDeadline", "kill"]


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


class StartDeadline:
    """Around the start of an engine, for which vLLM waits as long as its processes live.

    timeout_s: seconds after which those that this process has started meanwhile are killed, so that the start fails.
    """

    def __init__(self, timeout_s: float) -> None:
        self._before = multiprocessing.active_children()
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        self.passed = False

    def __enter__(self) -> StartDeadline:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self.passed = True
        kill(one for one in multiprocessing.active_children() if one not in self._before)


def kill(processes: Iterable[BaseProcess]) -> None:
    """Kill an engine's processes, and those that each of them has started."""
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(one.pid).children(recursive=True):
                child.kill()
            one.kill()
