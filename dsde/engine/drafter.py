"""One drafting, step by step: its distributions, its confidence, and its early end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsde.control.records import DraftStop, SpeculationPlan
from dsde.engine.signals import confidence

__all__ = ["DraftEnded", "DraftRecord"]


class DraftEnded(Exception):
    """Raised inside the draft loop when no request wants another draft token."""


class DraftRecord:
    """The draft distributions q of one drafting: D steps over the B requests of a batch.

    Holds references only, so its memory is that of the drafter's own outputs, and each drafting replaces the last.
    """

    def __init__(self) -> None:
        self.begin((), SpeculationPlan())

    def begin(self, request_ids: Sequence[str], plan: SpeculationPlan) -> None:
        """Start a drafting over `request_ids`, in batch order; forgets the one before."""
        self.request_ids = tuple(request_ids)
        self.is_probs = False
        self._steps: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._top_prob: list[torch.Tensor] = []
        self._entropy: list[torch.Tensor] = []
        self._stop: DraftStop | None = None if plan.stop is None else plan.stop.bind(self.request_ids)
        self._confidence = plan.confidence or plan.stop is not None
        self._depth = plan.depth

    def add(self, token_ids: torch.Tensor, distribution: torch.Tensor, is_probs: bool) -> None:
        """Take one draft step's tokens [B] and its [B, V] logits, or probabilities when is_probs.

        Raises DraftEnded when the plan's stop rule says that nobody goes on.
        """
        self._steps.append(distribution)
        self._tokens.append(token_ids)
        self.is_probs = is_probs
        if not self._confidence:
            return
        top_prob, entropy = confidence(distribution, is_probs=is_probs)
        self._top_prob.append(top_prob)
        self._entropy.append(entropy)
        step = len(self._steps) - 1
        if self._stop is not None and step + 1 < self._depth:
            # Rules run on the host; both signals come in one copy.
            said = torch.stack((top_prob, entropy)).cpu().numpy()
            if not self._stop.goes_on(step, said[0], said[1]).any():
                raise DraftEnded

    @property
    def tokens(self) -> torch.Tensor:
        """The draft tokens drawn so far, [B, D]."""
        return torch.stack(self._tokens, dim=1)

    @property
    def probs(self) -> torch.Tensor | None:
        """q of the draft tokens drawn so far, [B, D, V], where they were sampled; None where they are argmaxes."""
        return torch.stack(self._steps, dim=1) if self._steps and self.is_probs else None

    @property
    def top_prob(self) -> torch.Tensor | None:
        """max_v q, [B, D]; None when the plan did not ask."""
        return torch.stack(self._top_prob, dim=1) if self._top_prob else None

    @property
    def entropy(self) -> torch.Tensor | None:
        """H(q) in nats, [B, D]; None when the plan did not ask."""
        return torch.stack(self._entropy, dim=1) if self._entropy else None

    def gather(self, request_ids: Sequence[str], num_draft_tokens: Sequence[int]) -> torch.Tensor | None:
        """Return q as [N, V], request by request, for the first num_draft_tokens[r] positions of each request.

        None when a request or a position was not recorded (drafts without a distribution).
        """
        deepest = max(num_draft_tokens, default=0)
        if not self._steps or deepest > len(self._steps):
            return None
        row_of = {request_id: row for row, request_id in enumerate(self.request_ids)}
        if not row_of.keys() >= set(request_ids):
            return None
        count_R = torch.tensor(num_draft_tokens)
        row_N = torch.tensor([row_of[request_id] for request_id in request_ids]).repeat_interleave(count_R)
        position_N = torch.arange(row_N.numel()) - (count_R.cumsum(0) - count_R).repeat_interleave(count_R)
        q_NV = self._steps[0].new_empty((row_N.numel(), self._steps[0].shape[-1]))
        for position, step_BV in enumerate(self._steps[:deepest]):
            at_position = (position_N == position).nonzero().squeeze(1)
            rows = row_N[at_position].to(step_BV.device)
            q_NV.index_copy_(0, at_position.to(step_BV.device), step_BV.index_select(0, rows))
        return q_NV
