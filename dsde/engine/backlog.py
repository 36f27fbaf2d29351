"""What the draft model has not read yet: positions whose draft KV was skipped while nobody speculated.

Resting the drafter is free only if it can come back. Each request's backlog is the gap between the positions the draft
has read and those the target has; the next drafting reads the gap in the same forward pass. Blocks written while the
drafter rested are remembered, since the prefix cache may hand them to a later request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["DraftBacklog", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of a forward pass: `start` (tokens read before), `length` tokens of it, its KV block ids."""

    request_id: str
    start: int
    length: int
    blocks: np.ndarray


class DraftBacklog:
    """Per request, how many leading positions the draft has read; per KV block, whether its draft part is missing.

    Memory is one flag per block and one integer per request in the engine.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._unread_block = np.zeros(num_blocks, dtype=bool)
        self._read: dict[str, int] = {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that finished or lost their blocks."""
        for request_id in request_ids:
            self._read.pop(request_id, None)

    def gap(self, span: Span) -> int:
        """Tokens the draft lacks before `span.start`; a new request may bring unread blocks from the prefix cache."""
        read = self._read.get(span.request_id)
        if read is None:
            unread = self._unread_block[span.blocks[: -(-span.start // self._block_size)]]
            read = int(unread.argmax()) * self._block_size if unread.any() else span.start
        # What was read past the start were drafts that have been rejected since.
        self._read[span.request_id] = min(read, span.start)
        return span.start - self._read[span.request_id]

    def rested(self, spans: Sequence[Span]) -> None:
        """The target read these spans and the draft did not."""
        for span in spans:
            self.gap(span)
            self._unread_block[self._touched(span, span.start)] = True

    def caught_up(self, span: Span) -> None:
        """The draft has read everything before the span, and the span."""
        self._unread_block[self._touched(span, span.start - self.gap(span))] = False
        self._read[span.request_id] = span.start + span.length

    def _touched(self, span: Span, start: int) -> np.ndarray:
        return span.blocks[start // self._block_size : -(-(span.start + span.length) // self._block_size)]
