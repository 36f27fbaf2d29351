"""When requests arrive: a rate that may move, and Poisson arrivals at it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["MOST_REQUESTS", "PROFILES", "Profile", "arrivals"]

MOST_REQUESTS = 20_000
"""Of one run: records and their token times stay in memory for the report."""

# Share of the way from base to peak at each hour of a day: a low before dawn, highs before noon and in the evening.
_DAY = (18, 11, 6, 3, 0, 4, 14, 32, 58, 80, 95, 100, 92, 88, 86, 84, 80, 78, 82, 90, 94, 80, 54, 32, 18)

# (share of the run, share of the way from base to peak); straight lines between, two entries at one place are a jump.
PROFILES: dict[str, tuple[tuple[float, float], ...]] = {
    "steady": ((0.0, 0.0), (1.0, 0.0)),
    "ramp": ((0.0, 0.0), (0.5, 1.0), (1.0, 0.0)),
    "burst": (
        (0.0, 0.0),
        *((at + shift, level) for at in (0.2, 0.5, 0.8) for shift, level in ((0, 0), (0, 1), (0.05, 1), (0.05, 0))),
        (1.0, 0.0),
    ),
    "diurnal": tuple((hour / 24, level / 100) for hour, level in enumerate(_DAY)),
}
_GRID = 20_001


@dataclass(frozen=True, slots=True)
class Profile:
    """rate, peak: requests per second at the base and at the top; a steady profile has no top. duration_s: its time."""

    name: str
    rate: float
    peak: float
    duration_s: float

    def rate_at(self, at_s: float | np.ndarray) -> np.ndarray:
        """Requests per second at a time, in seconds from the start."""
        places, levels = zip(*PROFILES[self.name], strict=True)
        level = np.interp(np.asarray(at_s) / self.duration_s, places, levels)
        return np.asarray(self.rate + level * (self.peak - self.rate))


def arrivals(profile: Profile, seed: int) -> list[float]:
    """Seconds after the start at which requests arrive: Poisson, with the profile's rate, the same for the same seed.

    Arrivals of unit rate are drawn and mapped through the inverse of the integrated rate. Raises ValueError where the
    run would be of more than MOST_REQUESTS.
    """
    times = np.linspace(0.0, profile.duration_s, _GRID)
    rates = profile.rate_at(times)
    steps = np.diff(times) * (rates[1:] + rates[:-1]) / 2
    integral = np.concatenate([[0.0], np.cumsum(steps)])
    if integral[-1] > MOST_REQUESTS:
        raise ValueError(
            f"--rate and --duration would send {integral[-1]:.0f} requests; accepted: up to {MOST_REQUESTS} in one run"
        )
    chance = np.random.default_rng(seed)
    drawn = np.cumsum(chance.exponential(size=int(integral[-1] + 10 * np.sqrt(integral[-1]) + 20)))
    return [float(at) for at in np.interp(drawn[drawn < integral[-1]], integral, times)]
