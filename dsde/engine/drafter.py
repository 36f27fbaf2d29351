"""Remembers the distributions of the latest draft, step by step, until the next verification reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["DraftRecord"]


class DraftRecord:
    """The draft distributions q of one drafting: D steps over the B requests of a batch.

    Holds references only, so its memory is that of the drafter's own outputs, and each drafting replaces the last.
    """

    def __init__(self) -> None:
        self._steps: list[torch.Tensor] = []
        self._rows: dict[str, int] = {}
        self.is_probs = False

    def begin(self, request_ids: Sequence[str]) -> None:
        """Start a drafting over `request_ids`, in batch order; forgets the one before."""
        self._steps = []
        self._rows = {request_id: row for row, request_id in enumerate(request_ids)}

    def add(self, distribution: torch.Tensor, is_probs: bool) -> None:
        """Take one draft step's [B, V] logits, or probabilities when is_probs."""
        self._steps.append(distribution)
        self.is_probs = is_probs

    def gather(self, request_ids: Sequence[str], num_draft_tokens: Sequence[int]) -> torch.Tensor | None:
        """Return q as [N, V], request by request, for the first num_draft_tokens[r] positions of each request.

        None when a request or a position was not recorded (drafts without a distribution).
        """
        if not self._steps or max(num_draft_tokens, default=0) > len(self._steps):
            return None
        rows: list[int] = []
        positions: list[int] = []
        for request_id, count in zip(request_ids, num_draft_tokens, strict=True):
            if count == 0:
                continue
            row = self._rows.get(request_id)
            if row is None:
                return None
            rows += [row] * count
            positions += range(count)
        device = self._steps[0].device
        row_N = torch.tensor(rows, device=device)
        position_N = torch.tensor(positions, device=device)
        q_NV = self._steps[0].new_empty((len(rows), self._steps[0].shape[-1]))
        for position, step_BV in enumerate(self._steps[: max(num_draft_tokens)]):
            at_position = (position_N == position).nonzero().squeeze(1)
            q_NV.index_copy_(0, at_position, step_BV.index_select(0, row_N.index_select(0, at_position)))
        return q_NV
