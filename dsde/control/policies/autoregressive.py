"""Policy `autoregressive`: nobody speculates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.control.arrays import Ints
from dsde.control.history import Newest, Recent
from dsde.control.policies.base import Batch, Policy, Proposal, Signals
from dsde.control.policies.paper import Paper, PaperSettings

__all__ = ["Autoregressive", "AutoregressiveSettings"]


@dataclass(frozen=True, slots=True)
class AutoregressiveSettings:
    """It has none."""


class Autoregressive(Policy):
    """Length 0 for every request; steps drafted before a switch to it are still measured as in `paper`."""

    name = "autoregressive"

    def __init__(self, settings: AutoregressiveSettings, max_length: int) -> None:
        self.settings = settings
        self._measure = Paper(PaperSettings(), max_length)
        self.warmup_tokens = self._measure.warmup_tokens

    def signals(self, recent: Newest) -> Signals:
        """As in `paper`."""
        return self._measure.signals(recent)

    def propose(self, recent: Recent, limits: Ints) -> Proposal:
        """Zeros."""
        lengths = np.zeros_like(limits)
        return Proposal(lengths, lengths)

    def plan(self, batch: Batch) -> Proposal:
        """Zeros, without a look at the history."""
        lengths = np.zeros_like(batch.limits)
        return Proposal(lengths, lengths)
