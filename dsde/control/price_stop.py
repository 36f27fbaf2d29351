"""Stops the draft loop as soon as one more step no longer pays, by what the drafter has said so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dsde.control.acceptance import CLIP
from dsde.control.arrays import Bools, Floats, Numbers
from dsde.control.prediction import logit, sigmoid
from dsde.control.records import DraftStop

__all__ = ["PriceStop"]


class PriceStop(NamedTuple):
    """Another draft step iff sum_i max(0, S_ij a_next - threshold) > step_price, in tokens.

    S_ij: survival of request i's slot j. a_next: acceptance expected of the slot after it. rows: request id -> row of
    after, onward [B, 5] and own [B], the weights of its two models and its standing.
    """

    rows: Mapping[str, int]
    after: Floats
    onward: Floats
    own: Floats
    threshold: float
    step_price: float
    survival: Floats | None = None

    def bind(self, request_ids: Sequence[str]) -> DraftStop:
        """The rule in batch order, with every request alive; one that it does not know adds nothing."""
        row = np.array([self.rows.get(i, -1) for i in request_ids], dtype=np.int64)
        index = np.maximum(row, 0)
        own, after, onward = (values.take(index, 0) for values in (self.own, self.after, self.onward))
        return self._replace(after=after, onward=onward, own=own, survival=(row >= 0).astype(np.float64))

    def goes_on(self, step: int, top_prob: Numbers, entropy: Numbers) -> Bools:
        """All requests or none, for a draft step costs the same for one as for all."""
        assert self.survival is not None, "bind() comes before goes_on()"
        top = logit(np.nan_to_num(top_prob.astype(np.float64), nan=0.5), CLIP)
        spread = np.nan_to_num(entropy.astype(np.float64), nan=1.0) - 1.0
        now, next_ = (
            sigmoid(w[:, 0] + w[:, 1] * top + w[:, 2] * spread + w[:, 3] * self.own + w[:, 4] * math.log(position))
            for w, position in ((self.after, step + 1.0), (self.onward, step + 2.0))
        )
        np.multiply(self.survival, now, out=self.survival)
        worth = np.maximum(self.survival * next_ - self.threshold, 0.0).sum()
        return np.full(top.size, worth > self.step_price)
