"""Running figures of every request that has a slot: what its answer will say about its speculation.

One preallocated block; a row belongs to a slot. A preempted request's row is parked outside and put back later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsde.control.records import RequestSpeculation

__all__ = ["Figures"]

(STEPS, STEPS_OFF, DRAFTED, KLD_SUM, POSITIONS, OVERLAP_SUM, MEASURED, WVIR_SUM, STABLE, CAPPED) = range(10)
(WAIT_MS, CAUSED_MS, STRAGGLER) = range(10, 13)
(LENGTH_MAX, KLD_MAX) = range(13, 15)
(KLD_LAST, WVIR_LAST) = range(15, 17)
"""Columns of the block: sums, then maxima, then latest values, so that each kind is updated by one operation."""

COLUMNS = 17
EMPTY = torch.zeros(COLUMNS, dtype=torch.float64)


class Figures:
    """Sums, maxima and latest values per slot, float64 so that long answers lose nothing."""

    def __init__(self, capacity: int) -> None:
        self._block = torch.zeros(capacity, COLUMNS, dtype=torch.float64)

    def put(self, slot: int, row: Tensor | None = None) -> None:
        """Start a slot from nothing, or from a row that take() returned."""
        self._block[slot] = EMPTY if row is None else row

    def take(self, slot: int) -> Tensor:
        """A copy of the slot's row, [COLUMNS]."""
        return self._block[slot].clone()

    def measure(
        self,
        slots: Tensor,
        drafted: Tensor,
        usable: Tensor,
        kld_sum: Tensor,
        overlap_sum: Tensor,
        kld_max: Tensor,
        wvir: Tensor,
        stable: Tensor,
        capped: Tensor,
    ) -> None:
        """Add one verification step of R distinct slots; all [R]. Signals count where `usable`; capped: 0 or 1."""
        lengths = drafted.double()
        none = torch.zeros_like(lengths)
        signals = torch.stack((kld_sum, lengths, overlap_sum, torch.ones_like(lengths), wvir, stable.double()))
        always = torch.stack((torch.ones_like(lengths), (drafted == 0).double(), lengths))
        sums = torch.cat((always, torch.where(usable, signals, none), capped.unsqueeze(0)))
        self._block[:, STEPS : CAPPED + 1].index_add_(0, slots, sums.t())

        highest = self._block[:, LENGTH_MAX:].index_select(0, slots).unbind(1)
        new = torch.stack(
            (
                torch.maximum(highest[0], lengths),
                torch.where(usable, torch.maximum(highest[1], kld_max), highest[1]),
                torch.where(usable, kld_sum / lengths, highest[2]),
                torch.where(usable, wvir, highest[3]),
            ),
            dim=1,
        )
        self._block[:, LENGTH_MAX:].index_copy_(0, slots, new)

    def rest(self, slots: Tensor, capped: Tensor) -> None:
        """Add one step in which none of R distinct slots verified a draft; capped: [R], 0 or 1."""
        ones = torch.ones_like(capped)
        self._block[:, STEPS : STEPS_OFF + 1].index_add_(0, slots, torch.stack((ones, ones), dim=1))
        self._block[:, CAPPED].index_add_(0, slots, capped)

    def straggle(self, slots: Tensor, wait_ms: Tensor) -> None:
        """Add the time each of slots [B] waited for longer drafts, wait_ms [B]."""
        self._block[:, WAIT_MS].index_add_(0, slots, wait_ms)

    def blame(self, slot: int, caused_ms: float) -> None:
        """Book one step in which the slot's request alone was the longest, and the time it made the others wait."""
        self._block[slot, CAUSED_MS] += caused_ms
        self._block[slot, STRAGGLER] += 1.0

    @staticmethod
    def summary(row: Tensor, policy: str, length_limit: int) -> RequestSpeculation:
        """The record of a row [COLUMNS]; None where nothing was measured."""
        figure = row.tolist()
        steps, positions, measured = figure[STEPS], figure[POSITIONS], figure[MEASURED]
        return RequestSpeculation(
            policy=policy,
            steps=int(steps),
            steps_off=int(figure[STEPS_OFF]),
            length_mean=figure[DRAFTED] / steps if steps else 0.0,
            length_max=int(figure[LENGTH_MAX]),
            length_limit=length_limit,
            kld_mean=figure[KLD_SUM] / positions if measured else None,
            kld_last=figure[KLD_LAST] if measured else None,
            kld_max=figure[KLD_MAX] if measured else None,
            wvir_mean=figure[WVIR_SUM] / measured if measured else None,
            wvir_last=figure[WVIR_LAST] if measured else None,
            stability=figure[STABLE] / measured if measured else None,
            expected_acceptance_rate=figure[OVERLAP_SUM] / positions if measured else None,
            capped_steps=int(figure[CAPPED]),
            straggler_wait_ms=figure[WAIT_MS],
            straggler_caused_ms=figure[CAUSED_MS],
            straggler_steps=int(figure[STRAGGLER]),
        )
