"""The DSDE rule (arXiv 2509.01083) that `paper` and `reference` share: calibrate, predict, cap.

The presets differ in windows, SL_max and SL_min, warm-up length and rounding; each fills these in.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from dsde.control.arrays import Bools, Floats, Ints
from dsde.control.history import Newest, Recent
from dsde.control.policies.base import Policy, Proposal, Signals

__all__ = ["EPS", "DsdeRule"]

EPS = 1e-8
"""Keeps a ratio finite where its denominator is 0."""


class DsdeRule(Policy):
    """Predicts SL_hat per request and caps it with the batch's mean.

    A calibrating request runs its warm-up length. It has no prediction yet, so it is neither in the cap's mean nor cut.
    The setting `cap` = False leaves the cap out: an ablation, in which the longest prediction sets the batch's depth.
    """

    def propose(self, recent: Recent, limits: Ints) -> Proposal:
        """SL_hat = (1 - SF WVIR)(SL_max - SL_min) + SL_min if SF WVIR <= 1, else SL_min; SL_cap = mean_i SL_hat_i."""
        longest = self.longest(recent, limits)
        shortest = self.shortest(longest)
        penalty = self.signals(recent).penalty
        stable = (1.0 - penalty) * (longest - shortest) + shortest
        predicted = np.minimum(np.where(penalty <= 1.0, stable, shortest), limits)
        return self.capped(predicted, np.minimum(self.warmup(recent), limits), recent.calibrating)

    @abstractmethod
    def signals(self, recent: Newest) -> Signals:
        """SF and WVIR of each request."""

    @abstractmethod
    def longest(self, recent: Recent, limits: Ints) -> Floats:
        """SL_max, [B] float64, from the calibration."""

    @abstractmethod
    def shortest(self, longest: Floats) -> Floats:
        """SL_min, [B] float64, never above SL_max."""

    @abstractmethod
    def warmup(self, recent: Recent) -> Floats:
        """Length of a calibrating request, [B] float64."""

    @abstractmethod
    def round(self, lengths: Floats) -> Floats:
        """Real lengths to whole draft tokens."""

    @abstractmethod
    def cap(self, predicted: Floats) -> float:
        """SL_cap of the predictions [C] of the requests that are past calibration, a whole number of draft tokens."""

    def capped(self, predicted: Floats, warmup: Floats, calibrating: Bools) -> Proposal:
        """Whole lengths and their caps; a calibrating request's cap is its own length."""
        lengths = np.where(calibrating, warmup, self.round(predicted)).astype(np.int64)
        measured = predicted[~calibrating]
        if not measured.size or not self.settings.cap:
            return Proposal(lengths, lengths)
        cap = int(self.cap(measured))
        return Proposal(lengths, np.where(calibrating, lengths, cap))
