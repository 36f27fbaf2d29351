"""A stuck engine on a clock of its own."""

from __future__ import annotations

import multiprocessing
import signal
import time

from dsde.engine.deadline import StartDeadline, StepDeadline


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


def test_only_requests_without_a_step_are_overdue() -> None:
    clock = Clock()
    deadline = StepDeadline(60.0, clock)
    for steps, unfinished, after_s, overdue in (
        (0, 0, 500.0, False),  # idle, however long
        (0, 3, 30.0, False),
        (0, 3, 29.0, False),
        (0, 3, 2.0, True),
        (1, 3, 100.0, False),  # a step, if a slow one
        (1, 2, 59.0, False),
        (2, 2, 59.0, False),
        (2, 1, 61.0, True),
        (2, 0, 61.0, False),  # whoever waited has gone
        (2, 1, 59.0, False),
    ):
        clock.after(after_s)
        assert deadline.overdue(steps, unfinished) is overdue, (steps, unfinished, after_s)


def test_a_start_that_hangs_is_ended() -> None:
    spawn = multiprocessing.get_context("spawn")
    before, during = (spawn.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2))
    before.start()
    with StartDeadline(0.2) as deadline:
        during.start()
        during.join(20)
    assert deadline.passed
    assert during.exitcode == -signal.SIGKILL
    assert before.is_alive()
    before.kill()
    before.join()


def test_a_start_in_time_is_left_alone() -> None:
    with StartDeadline(0.05) as deadline:
        pass
    time.sleep(0.1)
    assert not deadline.passed
