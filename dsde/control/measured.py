"""Verification steps side by side, as history and figures take them in: one row for each request and step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsde.control.arrays import Bools, Floats, Ints, Numbers
from dsde.control.records import StepObservation

__all__ = ["Measured"]


class Measured:
    """M rows, oldest step first.

    slots, drafted, accepted: [M] int64. temperature, capped: [M]; capped: whether the plan cut the length.
    kld: [N] float64, nats; row r owns the next drafted[r] entries. kld_sum, kld_max, overlap_sum: [M], of its entries.
    usable: [M] bool, whether it has entries and all are finite. ignored: rows that have entries and are not usable.
    """

    __slots__ = (
        *("slots", "drafted", "accepted", "temperature", "capped", "kld"),
        *("kld_sum", "kld_max", "overlap_sum", "usable", "ignored"),
    )

    def __init__(self, steps: Sequence[tuple[Ints, StepObservation, Bools]]) -> None:
        """steps: of each step its slots [R], what it measured, and capped [R]; oldest first."""
        observed = [observation for _, observation, _ in steps]
        self.slots: Ints = np.concatenate([slots for slots, _, _ in steps])
        self.capped: Bools = np.concatenate([capped for _, _, capped in steps])
        self.drafted: Ints = np.concatenate([step.num_draft_tokens for step in observed])
        self.accepted: Ints = np.concatenate([step.num_accepted_tokens for step in observed])
        self.temperature: Numbers = np.concatenate([step.temperature for step in observed])
        self.kld: Floats = np.concatenate([step.kld for step in observed], dtype=np.float64)
        overlap = np.concatenate([step.overlap for step in observed], dtype=np.float64)
        some = self.drafted > 0
        starts = (np.add.accumulate(self.drafted) - self.drafted)[some]
        self.kld_sum, self.kld_max, self.overlap_sum = np.zeros((3, self.slots.size))
        if starts.size:
            self.kld_sum[some] = np.add.reduceat(self.kld, starts)
            self.kld_max[some] = np.maximum.reduceat(self.kld, starts)
            self.overlap_sum[some] = np.add.reduceat(overlap, starts)
        self.usable: Bools = np.isfinite(self.kld_sum + self.overlap_sum) & some
        self.ignored = int(np.count_nonzero(some) - np.count_nonzero(self.usable))
