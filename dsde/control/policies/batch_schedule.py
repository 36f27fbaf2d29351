"""Baseline `batch_schedule`: one length for everybody, by the size of the batch, from a table found by profiling.

It stands for vLLM's own num_speculative_tokens_per_batch_size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dsde.control.arrays import Ints
from dsde.control.history import Newest, Recent
from dsde.control.policies.base import Batch, Policy, Proposal, Signals, check_number
from dsde.control.policies.paper import Paper, PaperSettings

__all__ = ["BatchSchedule", "BatchScheduleSettings"]


@dataclass(frozen=True, slots=True)
class BatchScheduleSettings:
    """table: batch size -> length in draft tokens, of that size and up to the next; the smallest entry holds below it
    too. Keys may be strings, as JSON has them.
    """

    table: Mapping[int | str, int]

    def __post_init__(self) -> None:
        if not isinstance(self.table, Mapping | tuple) or not self.table:
            raise ValueError(
                f"speculation.settings.table {self.table!r} is not accepted: give a mapping of batch size to length"
            )
        rows: list[tuple[int, int]] = []
        for size, length in dict(self.table).items():
            size = int(size) if isinstance(size, str) and size.isdigit() else size
            check_number("table", size, 1, 1 << 20, integer=True)
            check_number("table", length, 0, 64, integer=True)
            rows.append((int(size), length))
        # As a tuple it can be compared and hashed, as a controller does with settings.
        object.__setattr__(self, "table", tuple(sorted(rows)))

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(batch size, length) in ascending order."""
        return self.table  # type: ignore[return-value]


class BatchSchedule(Policy):
    """Length by batch size. Stability is measured as the paper's preset measures it."""

    name = "batch_schedule"

    def __init__(self, settings: BatchScheduleSettings, max_length: int) -> None:
        self.settings = settings
        for size, length in settings.rows:
            check_number(f"table[{size}]", length, 0, max_length, integer=True)
        self._sizes = [size for size, _ in settings.rows]
        self._measure = Paper(PaperSettings(), max_length)
        self.warmup_tokens = self._measure.warmup_tokens

    def signals(self, recent: Newest) -> Signals:
        """As in `paper`."""
        return self._measure.signals(recent)

    def length(self, size: int) -> int:
        """The table's length for a batch of `size` requests."""
        return self.settings.rows[max(0, bisect_right(self._sizes, size) - 1)][1]

    def propose(self, recent: Recent, limits: Ints) -> Proposal:
        """The table's length for as many requests as `limits` has."""
        lengths = np.minimum(limits, self.length(limits.size))
        return Proposal(lengths, lengths)

    def plan(self, batch: Batch) -> Proposal:
        """The table's length for the whole batch, requests of other policies included."""
        lengths = np.minimum(batch.limits, self.length(batch.size))
        return Proposal(lengths, lengths)
