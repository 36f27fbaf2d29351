from __future__ import annotations

import numpy as np
import pytest

from loadtest.profile import PROFILES, Profile, arrivals


def test_steady_arrivals_are_poisson_at_the_rate() -> None:
    times = arrivals(Profile("steady", 10, 10, 1000), 0)
    # Standard deviation of the count is 100.
    assert abs(len(times) - 10_000) < 400
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1, rel=0.05)
    assert 0 < times[0] < times[-1] < 1000


def test_a_seed_gives_the_same_arrivals_and_another_others() -> None:
    profile = Profile("ramp", 1, 5, 60)
    assert arrivals(profile, 3) == arrivals(profile, 3) != arrivals(profile, 4)


def test_the_ramp_goes_up_and_back() -> None:
    profile = Profile("ramp", 1, 9, 100)
    assert profile.rate_at(np.array([0, 25, 50, 75, 100])).tolist() == [1, 5, 9, 5, 1]
    times = np.array(arrivals(Profile("ramp", 10, 90, 100), 0))
    # Of the integral 5000, quarters hold 750, 1750, 1750, 750.
    counts = np.histogram(times, [0, 25, 50, 75, 100])[0]
    assert counts == pytest.approx([750, 1750, 1750, 750], rel=0.15)


def test_bursts_come_at_the_peak_and_go() -> None:
    profile = Profile("burst", 1, 20, 100)
    assert profile.rate_at(np.array([10, 22, 40, 52, 70, 82, 99])).tolist() == [1, 20, 1, 20, 1, 20, 1]


def test_a_day_has_its_low_before_dawn_and_its_high_before_noon() -> None:
    profile = Profile("diurnal", 2, 10, 24)
    rates = [float(profile.rate_at(hour)) for hour in range(24)]
    assert (min(rates), rates.index(min(rates))) == (2, 4)
    assert (max(rates), rates.index(max(rates))) == (10, 11)
    assert profile.rate_at(0) == profile.rate_at(24)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_begins_and_ends_with_the_run(name: str) -> None:
    places = [place for place, _ in PROFILES[name]]
    assert (places[0], places[-1]) == (0, 1)
    assert places == sorted(places)


def test_a_run_is_bounded() -> None:
    with pytest.raises(ValueError, match="would send 60000 requests; accepted: up to 20000 in one run"):
        arrivals(Profile("steady", 1000, 1000, 60), 0)
