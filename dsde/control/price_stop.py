"""Stops the draft loop as soon as one more step no longer pays, by what the drafter has said so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsde.control.acceptance import CLIP
from dsde.control.records import DraftStop

__all__ = ["PriceStop"]


@dataclass(frozen=True, slots=True)
class PriceStop:
    """Another draft step iff sum_i max(0, S_ij a_next - threshold) > step_price, in tokens.

    S_ij: survival of request i's slot j. a_next: acceptance expected of the slot after it. rows: request id -> row of
    after, onward [B, 5] and own [B], the weights of its two models and the logit of its average.
    """

    rows: Mapping[str, int]
    after: Tensor
    onward: Tensor
    own: Tensor
    threshold: float
    step_price: float
    survival: Tensor | None = None

    def bind(self, request_ids: Sequence[str]) -> DraftStop:
        """The rule in batch order, with every request alive; one that it does not know adds nothing."""
        row = torch.tensor([self.rows.get(i, -1) for i in request_ids])
        index = row.clamp(min=0)
        own, after, onward = (t.index_select(0, index) for t in (self.own, self.after, self.onward))
        return replace(self, after=after, onward=onward, own=own, survival=(row >= 0).double())

    def goes_on(self, step: int, top_prob: Tensor, entropy: Tensor) -> Tensor:
        """All requests or none, for a draft step costs the same for one as for all."""
        assert self.survival is not None, "bind() comes before goes_on()"
        top = torch.logit(top_prob.double().cpu().nan_to_num_(0.5), eps=CLIP)
        spread = entropy.double().cpu().nan_to_num_(1.0) - 1.0
        said = torch.stack((torch.ones_like(top), top, spread, self.own), dim=1)
        position = torch.log(torch.tensor([step + 1.0, step + 2.0], dtype=torch.float64))
        now, next_ = (
            torch.sigmoid((said * w[:, :4]).sum(1) + w[:, 4] * at)
            for w, at in zip((self.after, self.onward), position, strict=True)
        )
        self.survival.mul_(now)
        worth = (self.survival * next_ - self.threshold).clamp_(min=0.0).sum()
        return (worth > self.step_price).expand(top.shape[0])
