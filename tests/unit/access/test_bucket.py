from __future__ import annotations

import pytest

from dsde.access.bucket import Bucket
from tests.unit.access.conftest import Clock


def test_a_minute_s_worth_is_there_at_once_and_comes_back_evenly(clock: Clock) -> None:
    bucket = Bucket(30, clock)
    for _ in range(30):
        assert bucket.wait_s() == 0.0
        bucket.take(1)
    # One unit each 2 s.
    assert bucket.wait_s() == pytest.approx(2.0)
    clock.now += 1.5
    assert bucket.wait_s() == pytest.approx(0.5)
    clock.now += 0.5
    assert bucket.wait_s() == pytest.approx(0.0)


def test_what_was_overdrawn_is_waited_for(clock: Clock) -> None:
    bucket = Bucket(60, clock)
    bucket.take(100)
    # From -40 to 1 at one a second.
    assert bucket.wait_s() == pytest.approx(41.0)


def test_it_never_holds_more_than_a_minute_s_worth(clock: Clock) -> None:
    bucket = Bucket(6, clock)
    clock.now += 1e6
    bucket.take(-5)
    bucket.take(6)
    assert bucket.wait_s() == pytest.approx(10.0)
