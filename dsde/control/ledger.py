"""What speculation has gained or lost against plain decoding, and whether it may go on."""

from __future__ import annotations

import math

__all__ = ["Ledger"]

QUIET = 16
"""Batch size from which a step's luck hardly matters."""


class Ledger:
    """Keeps the loss against plain decoding within `bound` of its time.

    L starts at `opening` plain steps; after a step L <- min(ceiling T, L + gain), gain = plain time of the tokens that
    the step emitted, less the time it took. Overdrawn once L < -bound * (plain time so far). Both hold from batch
    size QUIET on; luck evens out over a batch, so smaller ones get more of it, as sqrt(QUIET / batch size).
    """

    def __init__(self, bound: float = 0.005, opening: float = 2.0, ceiling: float = 5.0) -> None:
        self._bound, self._opening, self._ceiling = bound, opening, ceiling
        self._balance: float | None = None
        self._plain_ms = 0.0

    @property
    def balance(self) -> float:
        """L in ms."""
        return self._balance or 0.0

    @property
    def overdrawn(self) -> bool:
        """Whether speculation has to rest."""
        return self.balance < -self._bound * self._plain_ms

    def book(self, plain_step_ms: float, tokens_per_request: float, actual_ms: float, requests: int) -> None:
        """Book a step that drafted or verified drafts; plain_step_ms: a plain step of the same requests."""
        luck = plain_step_ms * math.sqrt(max(1.0, QUIET / requests))
        if self._balance is None:
            self._balance = self._opening * luck
        plain = plain_step_ms * tokens_per_request
        self._balance = min(self._ceiling * luck, self._balance + plain - actual_ms)
        self._plain_ms += plain

    def rest(self, plain_step_ms: float) -> None:
        """Book a step without speculation: it gains nothing and loses nothing."""
        self._plain_ms += plain_step_ms
