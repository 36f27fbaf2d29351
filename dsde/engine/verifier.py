"""Measures what the rejection sampler verifies: KLD and overlap of every drafted position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dsde.engine.drafter import DraftRecord
from dsde.engine.signals import divergence

__all__ = ["Verifier"]


class Verifier:
    """Turns one verification's distributions into signals.

    request_ids: returns the ids of the current batch, in batch order.
    """

    def __init__(self, drafts: DraftRecord, request_ids: Callable[[], Sequence[str]]) -> None:
        self._drafts = drafts
        self._request_ids = request_ids
        self.forget()

    def forget(self) -> None:
        """Drop the last measurement; called once it was reported."""
        self.verified: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
        self.kld: torch.Tensor | None = None
        self.overlap: torch.Tensor | None = None

    def measure(
        self, num_draft_tokens: list[int], target_logits: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> None:
        """Record kld [N] (nats) and overlap [N] of this step, on the device.

        The arguments are MeasuredRejectionSampler's. Nothing is recorded for drafts without a distribution, nor for
        vLLM's dummy runs.
        """
        self.forget()
        batch = self._request_ids()
        if len(batch) != len(num_draft_tokens):
            return
        drafted = [(request_id, count) for request_id, count in zip(batch, num_draft_tokens, strict=True) if count]
        ids, counts = tuple(i for i, _ in drafted), tuple(c for _, c in drafted)
        draft = draft_probs if draft_probs is not None else self._drafts.gather(ids, counts)
        if draft is None:
            return
        is_probs = draft_probs is not None or self._drafts.is_probs
        self.verified = (ids, counts)
        self.kld, self.overlap = divergence(target_logits, draft, q_is_probs=is_probs)
