"""Policy `static`: every request drafts K tokens at every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.control.arrays import Ints
from dsde.control.history import Newest, Recent
from dsde.control.policies.base import Batch, Policy, Proposal, Signals, check_number
from dsde.control.policies.paper import Paper, PaperSettings

__all__ = ["Static", "StaticSettings"]

DEFAULT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class StaticSettings:
    """length: K in draft tokens, 0 = no speculation; None = 4, or the longest length where that is shorter."""

    length: int | None = None


class Static(Policy):
    """K draft tokens for everyone; no cap. Stability is measured as the paper's preset measures it."""

    name = "static"

    def __init__(self, settings: StaticSettings, max_length: int) -> None:
        if settings.length is not None:
            check_number("length", settings.length, 0, max_length, integer=True)
        self.settings = StaticSettings(min(DEFAULT_LENGTH, max_length) if settings.length is None else settings.length)
        self._length = self.settings.length
        self._measure = Paper(PaperSettings(), max_length)
        self.warmup_tokens = self._measure.warmup_tokens

    def signals(self, recent: Newest) -> Signals:
        """As in `paper`."""
        return self._measure.signals(recent)

    def propose(self, recent: Recent, limits: Ints) -> Proposal:
        """min(K, limit) for each request."""
        lengths = np.minimum(limits, self._length)
        return Proposal(lengths, lengths)

    def plan(self, batch: Batch) -> Proposal:
        """min(K, limit) for each request, without a look at the history."""
        lengths = np.minimum(batch.limits, self._length)
        return Proposal(lengths, lengths)
