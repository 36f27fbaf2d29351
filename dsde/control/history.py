"""What the controller remembers of each running request: its newest KLDs and its calibration, in preallocated arrays.

A request owns one slot. Every operation works on many slots at once and loops over neither requests nor positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dsde.control.arrays import Bools, Floats, Ints, Numbers

__all__ = ["WINDOW", "History", "Recent"]

WINDOW = 30
"""KLDs kept per request: the longest window of the paper, in verified positions."""

(HEAD, FILLED, VERIFIED, ACCEPTED_MAX, PRE_SUM, PRE_COUNT, PRE_MAX, FULL_STEPS, LAST, TEMPERATURE, WARMUP) = range(11)
COLUMNS = 11
"""A slot's state is one row, so that a step gathers and writes it with one operation each:

ring head, KLDs in the ring, draft tokens verified; of the calibration SL_A,max, KLD sum, count and maximum, and fully
accepted steps; mean KLD of the latest measured step, temperature, and the calibration's length in draft tokens.
"""


@dataclass(frozen=True, slots=True)
class Recent:
    """History of B requests as a policy reads it; float64 throughout, so that equal KLDs have variance 0.

    kld: [B, WINDOW], nats, newest last, not divided by the temperature. count: [B] int64, valid entries, at the end.
    kld_last: [B], mean KLD of the latest measured step, 0 before the first. temperature: [B].
    calibrating: [B] bool, fewer than the warm-up's tokens verified so far.
    accepted_max: [B], SL_A,max of the calibration. full_steps: [B], calibration steps whose drafts were all accepted.
    kld_mean_pre, kld_max_pre: [B], nats, over the calibration; 0 where nothing was measured.
    """

    kld: Floats
    count: Ints
    kld_last: Floats
    temperature: Floats
    calibrating: Bools
    accepted_max: Floats
    full_steps: Floats
    kld_mean_pre: Floats
    kld_max_pre: Floats

    @classmethod
    def join(cls, parts: Sequence[Recent]) -> Recent:
        """One after the other."""
        return cls(*(np.concatenate(column) for column in zip(*(part._columns for part in parts), strict=True)))

    def of(self, part: Ints | slice) -> Recent:
        """The requests at positions `part`."""
        return Recent(*(column[part] for column in self._columns))

    @property
    def _columns(self) -> list[np.ndarray]:
        return [getattr(self, name) for name in self.__slots__]


class History:
    """Fixed-size history of at most `capacity` requests; memory never grows after construction."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: give at least 1 request")
        self.capacity = capacity
        # Each KLD stands twice, WINDOW apart, so that the newest WINDOW are one run wherever the ring's head is.
        self._ring = np.zeros(capacity * 2 * WINDOW)
        self._runs = sliding_window_view(self._ring, WINDOW)
        self._state = np.zeros((capacity, COLUMNS))
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
        self._ring[slot * 2 * WINDOW : (slot + 1) * 2 * WINDOW] = 0.0
        self._state[slot] = 0.0
        self._state[slot, WARMUP] = warmup_tokens
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; its content is forgotten."""
        self._free.append(slot)

    def set_warmup(self, slots: Ints, warmup_tokens: int) -> None:
        """Change where the calibration of slots [B] ends; the draft tokens verified so far count towards it."""
        self._state[slots, WARMUP] = warmup_tokens

    def calibrating(self, slot: int) -> bool:
        """Whether the slot's request has verified fewer draft tokens than its calibration takes."""
        return bool(self._state[slot, 2] < self._state[slot, WARMUP])

    def append(
        self,
        slots: Ints,
        drafted: Ints,
        accepted: Ints,
        temperature: Numbers,
        verified: Bools,
        kld: Numbers,
        kld_sum: Floats,
        kld_max: Floats,
        usable: Bools,
    ) -> None:
        """Add one verification step of R distinct slots.

        slots, drafted, accepted: [R] int64. temperature: [R]. verified: [R, K] bool, the first drafted[r] of row r, K
        the longest. kld: [N] nats, at the positions of `verified`, row by row. kld_sum, kld_max: [R] float64, per
        request. usable: [R] bool; a request that is not usable keeps its signals, but its draft tokens still count
        towards the calibration. Only the newest WINDOW positions stay.
        """
        state = self._state.take(slots, 0)
        head = state[:, HEAD].astype(np.int64)
        depth = verified.shape[1]
        step = np.arange(depth)
        cells = head[:, None] + step
        cells %= WINDOW
        cells += (slots * (2 * WINDOW))[:, None]
        count = drafted
        every = np.count_nonzero(usable) == np.count_nonzero(drafted)
        if every and depth <= WINDOW:
            cell = cells[verified]
        else:
            kept = usable[:, None] & (drafted[:, None] - step <= WINDOW)
            kld = kld[kept[verified]]
            cell = cells[verified & kept]
            count = drafted * usable
        self._ring[cell] = kld
        cell += WINDOW
        self._ring[cell] = kld

        warm = state[:, VERIFIED] < state[:, WARMUP]
        if np.count_nonzero(warm):
            self._calibrate(state, warm, drafted, accepted, kld_sum, kld_max, usable)
        head += count
        head %= WINDOW
        state[:, HEAD] = head
        np.minimum(state[:, FILLED] + count, WINDOW, out=state[:, FILLED])
        state[:, VERIFIED] += drafted
        np.divide(kld_sum, drafted, out=state[:, LAST], where=usable)
        state[:, TEMPERATURE] = temperature
        self._state[slots] = state

    @staticmethod
    def _calibrate(
        state: Floats, warm: Bools, drafted: Ints, accepted: Ints, kld_sum: Floats, kld_max: Floats, usable: Bools
    ) -> None:
        """Add the step to the calibration of the rows of `state` that are `warm`."""
        measured = usable & warm
        np.maximum(state[:, ACCEPTED_MAX], accepted, out=state[:, ACCEPTED_MAX], where=warm)
        np.add(state[:, PRE_SUM], kld_sum, out=state[:, PRE_SUM], where=measured)
        np.add(state[:, PRE_COUNT], drafted, out=state[:, PRE_COUNT], where=measured)
        np.maximum(state[:, PRE_MAX], kld_max, out=state[:, PRE_MAX], where=measured)
        state[:, FULL_STEPS] += warm & (drafted > 0) & (accepted == drafted)

    def recent(self, slots: Ints) -> Recent:
        """The history of slots [B], KLDs in order of age."""
        state = self._state.take(slots, 0)
        return Recent(
            kld=self._runs[slots * (2 * WINDOW) + state[:, HEAD].astype(np.int64)],
            count=state[:, FILLED].astype(np.int64),
            kld_last=state[:, LAST],
            temperature=state[:, TEMPERATURE],
            calibrating=state[:, VERIFIED] < state[:, WARMUP],
            accepted_max=state[:, ACCEPTED_MAX],
            full_steps=state[:, FULL_STEPS],
            kld_mean_pre=state[:, PRE_SUM] / np.maximum(state[:, PRE_COUNT], 1.0),
            kld_max_pre=state[:, PRE_MAX],
        )
