"""Running figures of every request that has a slot: what its answer will say about its speculation.

One preallocated block; a row belongs to a slot. A preempted request's row is parked outside and put back later.
"""

from __future__ import annotations

import numpy as np

from dsde.control.arrays import Bools, Floats, Ints
from dsde.control.measured import Measured
from dsde.control.records import RequestSpeculation

__all__ = ["Figures"]

(STEPS, STEPS_OFF, DRAFTED, KLD_SUM, POSITIONS, OVERLAP_SUM, MEASURED, WVIR_SUM, STABLE, CAPPED) = range(10)
(WAIT_MS, CAUSED_MS, STRAGGLER) = range(10, 13)
(LENGTH_MAX, KLD_MAX) = range(13, 15)
(KLD_LAST, WVIR_LAST) = range(15, 17)
"""Columns of the block: sums, then maxima, then latest values, so that each kind is updated by one operation."""

COLUMNS = 17
EMPTY = np.zeros(COLUMNS)


class Figures:
    """Sums, maxima and latest values per slot, float64 so that long answers lose nothing."""

    def __init__(self, capacity: int) -> None:
        self._block = np.zeros((capacity, COLUMNS))

    def put(self, slot: int, row: Floats | None = None) -> None:
        """Start a slot from nothing, or from a row that take() returned."""
        self._block[slot] = EMPTY if row is None else row

    def take(self, slot: int) -> Floats:
        """A copy of the slot's row, [COLUMNS]."""
        return self._block[slot].copy()

    def measure(self, steps: Measured, wvir: Floats, stable: Bools) -> None:
        """Add verification steps; wvir, stable: [U], of the usable rows alone, for only their signals count."""
        slots, usable = steps.slots, steps.usable
        new = np.zeros((CAPPED + 1, slots.size))
        new[STEPS] = 1.0
        new[STEPS_OFF] = steps.drafted == 0
        new[DRAFTED] = steps.drafted
        new[CAPPED] = steps.capped
        drafted, kld_sum = steps.drafted[usable], steps.kld_sum[usable]
        new[KLD_SUM:CAPPED, usable] = (kld_sum, drafted, steps.overlap_sum[usable], np.ones(wvir.size), wvir, stable)
        np.add.at(self._block[:, : CAPPED + 1], slots, new.T)
        np.maximum.at(self._block[:, LENGTH_MAX], slots, steps.drafted)
        measured = slots[usable]
        np.maximum.at(self._block[:, KLD_MAX], measured, steps.kld_max[usable])
        # Where a slot stands more than once, numpy keeps the last value.
        self._block[measured, KLD_LAST] = kld_sum / drafted
        self._block[measured, WVIR_LAST] = wvir

    def rest(self, slots: Ints, capped: Bools) -> None:
        """Add one step in which none of R distinct slots verified a draft; capped: [R]."""
        rows = self._block.take(slots, 0)
        rows[:, STEPS : STEPS_OFF + 1] += 1.0
        rows[:, CAPPED] += capped
        self._block[slots] = rows

    def straggle(self, slots: Ints, wait_ms: Floats) -> None:
        """Add the time each of the distinct slots [B] waited for longer drafts, wait_ms [B]."""
        self._block[slots, WAIT_MS] += wait_ms

    def blame(self, slot: int, caused_ms: float) -> None:
        """Book one step in which the slot's request alone was the longest, and the time it made the others wait."""
        self._block[slot, CAUSED_MS] += caused_ms
        self._block[slot, STRAGGLER] += 1.0

    @staticmethod
    def summary(row: Floats, policy: str, length_limit: int) -> RequestSpeculation:
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
