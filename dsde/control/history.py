"""What the controller remembers of each running request: its newest KLDs and its calibration, in preallocated arrays.

A request owns one slot. Every operation works on many slots at once and loops over neither requests nor positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.control.arrays import Bools, Floats, Ints, Numbers
from dsde.control.measured import Measured

__all__ = ["WINDOW", "History", "Newest", "Recent"]

WINDOW = 30
"""KLDs kept per request: the longest window of the paper, in verified positions."""
AGES = np.arange(-WINDOW, 0)


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest KLDs of B requests, all that signals read; float64 throughout, so that equal KLDs have variance 0.

    kld: [B, WINDOW], nats, newest last, not divided by the temperature. count: [B] int64, valid entries, at the end.
    kld_last: [B], mean KLD of the latest measured step, 0 before the first. temperature: [B].
    """

    kld: Floats
    count: Ints
    kld_last: Floats
    temperature: Numbers

    def of(self, rows: Ints) -> Newest:
        """The requests at `rows`."""
        return Newest(self.kld[rows], self.count[rows], self.kld_last[rows], self.temperature[rows])


@dataclass(frozen=True, slots=True)
class Recent(Newest):
    """History of B requests as a policy reads it: their newest KLDs, and their calibration.

    calibrating: [B] bool, fewer than the warm-up's tokens verified so far.
    accepted_max: [B], SL_A,max of the calibration. full_steps: [B], calibration steps whose drafts were all accepted.
    kld_mean_pre, kld_max_pre: [B], nats, over the calibration; 0 where nothing was measured.
    """

    calibrating: Bools
    accepted_max: Floats
    full_steps: Floats
    kld_mean_pre: Floats
    kld_max_pre: Floats


class History:
    """Fixed-size history of at most `capacity` requests; memory never grows after construction."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: give at least 1 request")
        self.capacity = capacity
        self._kld = np.zeros((capacity, WINDOW))
        self._count = np.zeros(capacity, dtype=np.int64)
        self._kld_last = np.zeros(capacity)
        self._temperature = np.zeros(capacity)
        self._verified = np.zeros(capacity, dtype=np.int64)
        self._warmup = np.zeros(capacity, dtype=np.int64)
        # Of the calibration: [SL_A,max, fully accepted steps, KLD sum, KLD count, KLD maximum] of each slot.
        self._calibration = np.zeros((5, capacity))
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        """Slots in use."""
        return self.capacity - len(self._free)

    def allocate(self, warmup_tokens: int) -> int:
        """An empty slot whose calibration takes `warmup_tokens` verified draft tokens. RuntimeError if none is free."""
        if not self._free:
            raise RuntimeError(
                f"all {self.capacity} history slots are taken: finish or preempt a request first, or raise max_num_seqs"
            )
        slot = self._free.pop()
        for state in (self._kld, self._count, self._kld_last, self._temperature, self._verified):
            state[slot] = 0
        self._calibration[:, slot] = 0.0
        self._warmup[slot] = warmup_tokens
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; its content is forgotten."""
        self._free.append(slot)

    def set_warmup(self, slots: Ints, warmup_tokens: int) -> None:
        """Change where the calibration of slots [B] ends; the draft tokens verified so far count towards it."""
        self._warmup[slots] = warmup_tokens

    def calibrating(self, slot: int) -> bool:
        """Whether the slot's request has verified fewer draft tokens than its calibration takes."""
        return bool(self._verified[slot] < self._warmup[slot])

    def append(self, steps: Measured) -> Newest:
        """Add verification steps; the newest KLDs as they stood after each usable row of `steps`, [U].

        A row that is not usable keeps its slot's signals, but its draft tokens still count towards the calibration.
        """
        slots, usable = steps.slots, steps.usable
        if np.count_nonzero(self._calibrating(slots)):
            self._calibrate(steps)
        np.add.at(self._verified, slots, steps.drafted)
        # Where a slot stands more than once, numpy keeps the last value.
        self._temperature[slots] = steps.temperature

        measured, drafted = slots[usable], steps.drafted[usable]
        kld_last = self._kld_last[measured] = steps.kld_sum[usable] / drafted
        runs = _Runs(measured)
        count = self._count[measured] = np.minimum(self._count.take(measured) + runs.sums(drafted), WINDOW)
        kld = self._push(runs, drafted, steps.kld[usable.repeat(steps.drafted)])
        return Newest(kld, count, kld_last, steps.temperature[usable])

    def _push(self, runs: _Runs, count: Ints, kld: Floats) -> Floats:
        """Add the next count[u] entries of `kld` to row u's slot; the newest WINDOW after each row, [U, WINDOW]."""
        starts = (np.add.accumulate(count) - count).take(runs.order)
        count = count.take(runs.order)
        ends = np.add.accumulate(count)
        # One tape: of each slot its old KLDs, then its new ones.
        shift = WINDOW * (runs.index + 1)
        tape = np.empty(kld.size + WINDOW * runs.slots.size)
        entry = np.arange(kld.size)
        tape[entry + shift.repeat(count)] = kld.take(entry + (starts - ends + count).repeat(count))
        ends += shift
        tape[(ends - count).take(runs.first)[:, None] + AGES] = self._kld.take(runs.slots, 0)
        windows = tape.take(ends[:, None] + AGES)
        self._kld[runs.slots] = windows.take(runs.last, 0)
        newest = np.empty_like(windows)
        newest[runs.order] = windows
        return newest

    def _calibrate(self, steps: Measured) -> None:
        """Add the rows that belong to their slot's calibration, which each row's own draft tokens may end."""
        slots, drafted = steps.slots, steps.drafted
        accepted_max, full_steps, kld_sum, kld_count, kld_max = self._calibration
        before = self._verified.take(slots) + _Runs(slots).sums(drafted) - drafted
        warm = before < self._warmup.take(slots)
        np.maximum.at(accepted_max, slots[warm], steps.accepted[warm])
        np.add.at(full_steps, slots[warm & (drafted > 0) & (steps.accepted == drafted)], 1.0)
        warm &= steps.usable
        measured = slots[warm]
        np.add.at(kld_sum, measured, steps.kld_sum[warm])
        np.add.at(kld_count, measured, drafted[warm])
        np.maximum.at(kld_max, measured, steps.kld_max[warm])

    def _calibrating(self, slots: Ints) -> Bools:
        return self._verified.take(slots) < self._warmup.take(slots)

    def recent(self, slots: Ints) -> Recent:
        """The history of slots [B]."""
        accepted_max, full_steps, kld_sum, kld_count, kld_max = self._calibration.take(slots, 1)
        return Recent(
            kld=self._kld.take(slots, 0),
            count=self._count.take(slots),
            kld_last=self._kld_last.take(slots),
            temperature=self._temperature.take(slots),
            calibrating=self._calibrating(slots),
            accepted_max=accepted_max,
            full_steps=full_steps,
            kld_mean_pre=kld_sum / np.maximum(kld_count, 1.0),
            kld_max_pre=kld_max,
        )


class _Runs:
    """Rows [M] sorted by slot, each slot's own in their order.

    order: [M], the rows. slots: [G], the distinct slots. first, last: [G], where each one's run begins and ends.
    index: [M], of each sorted row which slot it has, 0..G-1.
    """

    __slots__ = ("first", "index", "last", "order", "slots")

    def __init__(self, slots: Ints) -> None:
        self.order = slots.argsort(kind="stable")
        by_slot = slots.take(self.order)
        opens = np.empty(slots.size + 1, dtype=np.bool_)
        opens[:1] = opens[-1:] = True
        np.not_equal(by_slot[1:], by_slot[:-1], out=opens[1:-1])
        self.index = np.add.accumulate(opens[:-1], dtype=np.int64) - 1
        (bounds,) = opens.nonzero()
        self.first, self.last = bounds[:-1], bounds[1:] - 1
        self.slots = by_slot.take(self.first)

    def sums(self, values: Ints) -> Ints:
        """[M], in the order of the rows given: the sum of `values` over the slot's rows up to and with this one."""
        by_slot = values.take(self.order)
        total = np.add.accumulate(by_slot)
        total -= (total - by_slot).take(self.first).take(self.index)
        sums = np.empty_like(total)
        sums[self.order] = total
        return sums
