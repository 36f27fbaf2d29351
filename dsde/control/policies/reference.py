"""Preset `reference`: DSDE as its authors' public code computes it, where that differs from the paper.

Windows are shares of the history, the scale factor's KLD is divided by the temperature, every length is rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.control.arrays import Floats, Ints
from dsde.control.history import Newest, Recent
from dsde.control.policies.base import Signals, check_flag, check_number
from dsde.control.policies.dsde import EPS, DsdeRule
from dsde.control.signals import scale_factor, weighted_variance, wvir

__all__ = ["Reference", "ReferenceSettings"]

FLAT_VARIANCE = 1e-6
FLAT_WVIR = 20.0


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    """decay: weight of a KLD is decay**age. min_length: least SL_min. warmup_length: SL of the first step.
    warmup_tokens: verified draft tokens that end calibration.
    cap: whether SL_cap applies.
    """

    decay: float = 0.9
    min_length: int = 2
    warmup_length: int = 2
    warmup_tokens: int = 30
    cap: bool = True

    def __post_init__(self) -> None:
        check_number("decay", self.decay, 0, 1, open_low=True)
        check_number("min_length", self.min_length, 0, 64, integer=True)
        check_number("warmup_length", self.warmup_length, 1, 64, integer=True)
        check_number("warmup_tokens", self.warmup_tokens, 1, 10_000, integer=True)
        check_flag("cap", self.cap)


class Reference(DsdeRule):
    """DSDE with the newest third over all the history, SL_max = SL_A,max (1 + mean / 2 max) and a doubling warm-up."""

    name = "reference"

    def __init__(self, settings: ReferenceSettings, max_length: int) -> None:
        self.settings = settings
        self.warmup_tokens = settings.warmup_tokens

    def signals(self, recent: Newest) -> Signals:
        """SF of KLD / temperature; WVIR of the KLDs as they are, 20 where they are flat, 0 with fewer than two."""
        heat = np.where(recent.temperature == 0.0, 1.0, recent.temperature)
        third = np.maximum(recent.count // 3, 1)
        short = weighted_variance(recent.kld, third, self.settings.decay)
        long = weighted_variance(recent.kld, recent.count, self.settings.decay)
        ratio = np.where(long < FLAT_VARIANCE, FLAT_WVIR, wvir(short, np.maximum(long, FLAT_VARIANCE), 0.0))
        ratio = np.where(recent.count < 2, 0.0, ratio)
        return Signals(scale_factor(recent.kld_last / heat), ratio)

    def longest(self, recent: Recent, limits: Ints) -> Floats:
        """SL_max = round(SL_A,max (1 + mu_KLD,pre / (2 KLD_pre,max))), within the configured range."""
        growth = 1.0 + 0.5 * recent.kld_mean_pre / (recent.kld_max_pre + EPS)
        within = np.minimum(np.rint(recent.accepted_max * growth), limits)
        return np.maximum(within, self.settings.min_length)

    def shortest(self, longest: Floats) -> Floats:
        """SL_min = ceil(0.1 SL_max), at least the configured minimum."""
        return np.minimum(np.maximum(np.ceil(0.1 * longest), self.settings.min_length), longest)

    def warmup(self, recent: Recent) -> Floats:
        """Doubles after every step whose drafts were all accepted."""
        return self.settings.warmup_length * np.exp2(np.minimum(recent.full_steps, 16.0))

    def round(self, lengths: Floats) -> Floats:
        """Up."""
        return np.ceil(lengths)

    def cap(self, predicted: Floats) -> float:
        """The mean of the whole predictions, rounded up."""
        return float(np.ceil(self.round(predicted).mean()))
