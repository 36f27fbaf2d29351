"""Preset `paper`: DSDE exactly as arXiv 2509.01083 prints it.

The paper does not say how a length becomes a whole number. Here SL_hat and SL_cap stay real until they have been
compared, and are then rounded half up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.control.arrays import Floats, Ints
from dsde.control.history import WINDOW, Newest, Recent
from dsde.control.policies.base import Signals, check_flag, check_number
from dsde.control.policies.dsde import EPS, DsdeRule
from dsde.control.signals import scale_factor, weighted_variance, wvir

__all__ = ["Paper", "PaperSettings"]


@dataclass(frozen=True, slots=True)
class PaperSettings:
    """decay: weight of a KLD is decay**age. short_window, long_window: newest KLDs under WVIR's two variances.
    min_length: SL_min. warmup_length: SL while calibrating. warmup_tokens: verified draft tokens that end calibration.
    cap: whether SL_cap applies.
    """

    decay: float = 0.85
    short_window: int = 10
    long_window: int = WINDOW
    min_length: int = 2
    warmup_length: int = 5
    warmup_tokens: int = 30
    cap: bool = True

    def __post_init__(self) -> None:
        check_number("decay", self.decay, 0, 1, open_low=True)
        check_number("long_window", self.long_window, 2, WINDOW, integer=True)
        check_number("short_window", self.short_window, 2, self.long_window, integer=True)
        check_number("min_length", self.min_length, 0, 64, integer=True)
        check_number("warmup_length", self.warmup_length, 1, 64, integer=True)
        check_number("warmup_tokens", self.warmup_tokens, 1, 10_000, integer=True)
        check_flag("cap", self.cap)


class Paper(DsdeRule):
    """DSDE with the paper's windows, SL_max = SL_A,max (1 + mean / max) and a fixed warm-up length."""

    name = "paper"

    def __init__(self, settings: PaperSettings, max_length: int) -> None:
        self.settings = settings
        self.warmup_tokens = settings.warmup_tokens

    def signals(self, recent: Newest) -> Signals:
        """SF of the latest step's mean KLD as it is, WVIR = Var_w(newest 10) / (Var_w(newest 30) + eps)."""
        decay, short, long = self.settings.decay, self.settings.short_window, self.settings.long_window
        short_variance = weighted_variance(recent.kld[:, -short:], np.minimum(recent.count, short), decay)
        long_variance = weighted_variance(recent.kld[:, -long:], np.minimum(recent.count, long), decay)
        return Signals(scale_factor(recent.kld_last), wvir(short_variance, long_variance, EPS))

    def longest(self, recent: Recent, limits: Ints) -> Floats:
        """SL_max = SL_A,max (1 + mu_KLD,pre / (KLD_pre,max + eps)); SL_min where a poor calibration falls below it."""
        growth = 1.0 + recent.kld_mean_pre / (recent.kld_max_pre + EPS)
        return np.maximum(recent.accepted_max * growth, self.settings.min_length)

    def shortest(self, longest: Floats) -> Floats:
        """SL_min, a constant."""
        return np.full_like(longest, self.settings.min_length)

    def warmup(self, recent: Recent) -> Floats:
        """The fixed warm-up length."""
        return np.full_like(recent.accepted_max, self.settings.warmup_length)

    def round(self, lengths: Floats) -> Floats:
        """Half up."""
        return np.floor(lengths + 0.5)

    def cap(self, predicted: Floats) -> float:
        """The mean of the real predictions, rounded last."""
        return float(self.round(predicted.mean()))
