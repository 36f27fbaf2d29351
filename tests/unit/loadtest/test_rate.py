from __future__ import annotations

from collections.abc import Callable

import pytest

from loadtest.drive import CANCELLED
from loadtest.profile import MOST_REQUESTS, Profile, arrivals
from loadtest.rate import HIGHEST, LOWEST, Probe, bounds, find_rate, judge
from loadtest.records import Record


def server(limit: float, seen: list[float]) -> Callable[[float], object]:
    async def probe(rate: float) -> Probe:
        seen.append(rate)
        return Probe(rate, 10, 100.0 if rate <= limit else 900.0, 0, holds=rate <= limit)

    return probe


@pytest.mark.parametrize(("start", "limit"), [(1.0, 13.7), (64.0, 13.7), (1.0, 1.0), (2.0, 0.11)])
async def test_the_limit_is_found_to_a_tenth_from_either_side(start: float, limit: float) -> None:
    seen: list[float] = []
    found = await find_rate(server(limit, seen), start, out=lambda: False)
    assert found.exact
    assert found.rate is not None
    assert found.failing is not None
    assert found.rate <= limit < found.failing <= 1.1 * found.rate
    assert len(seen) <= 12


async def test_time_bounds_the_search() -> None:
    seen: list[float] = []
    found = await find_rate(server(13.7, seen), 1.0, out=lambda: len(seen) == 5)
    assert seen == [1, 2, 4, 8, 16]
    assert (found.rate, found.failing, found.exact) == (8, 16, False)


async def test_a_server_that_takes_everything_or_nothing_ends_the_search() -> None:
    found = await find_rate(server(float("inf"), []), 1.0, out=lambda: False)
    assert (found.rate, found.failing) == (HIGHEST, None)
    found = await find_rate(server(0.0, []), 1.0, out=lambda: False)
    assert (found.rate, found.failing) == (None, LOWEST)


@pytest.mark.parametrize("duration_s", [5.0, 30.0, 600.0])
async def test_every_rate_that_is_tried_can_be_sent(duration_s: float) -> None:
    for limit in (float("inf"), 0.0):
        seen: list[float] = []
        await find_rate(server(limit, seen), 1.0, lambda: False, bounds(duration_s))
        for rate in seen:
            assert 0 < len(arrivals(Profile("steady", rate, rate, duration_s), seed=1)) <= MOST_REQUESTS


def test_a_request_without_a_first_token_is_one_that_missed_it(record: Callable[..., Record]) -> None:
    good = [record() for _ in range(19)]
    given_up = record(error=CANCELLED, first_token_s=None)
    # 1 of 20 leaves p95 with the others, 2 of 21 do not.
    assert judge(1.0, [*good, given_up], 1000).p95_ttft_ms == float("inf")
    assert judge(1.0, [*good * 2, given_up], 1000).holds
    assert not judge(1.0, good, 999).holds


def test_an_error_of_the_server_s_fails_the_rate(record: Callable[..., Record]) -> None:
    good = [record() for _ in range(99)]
    assert judge(1.0, [*good, record(error=CANCELLED)], 1000).holds
    probe = judge(1.0, [*good, record(error="http 503")], 1000)
    assert (probe.failed, probe.holds) == (1, False)
    assert not judge(1.0, [], 1000).holds
