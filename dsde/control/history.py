"""What the controller remembers of each running request: its newest KLDs and its calibration, in preallocated tensors.

A request owns one slot. Every operation works on many slots at once and loops over neither requests nor positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["WINDOW", "History", "Recent"]

WINDOW = 30
"""KLDs kept per request: the longest window of the paper, in verified positions."""

COLUMNS = 11
WARMUP = 10
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

    kld: Tensor
    count: Tensor
    kld_last: Tensor
    temperature: Tensor
    calibrating: Tensor
    accepted_max: Tensor
    full_steps: Tensor
    kld_mean_pre: Tensor
    kld_max_pre: Tensor


class History:
    """Fixed-size history of at most `capacity` requests; memory never grows after construction."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: give at least 1 request")
        self.capacity = capacity
        # Each KLD stands twice, WINDOW apart, so that the newest WINDOW are one run wherever the ring's head is.
        # The row after the last slot takes the writes of positions that are not kept.
        self._ring = torch.zeros((capacity + 1) * 2 * WINDOW, dtype=torch.float64)
        self._runs = self._ring.unfold(0, WINDOW, 1)
        self._nowhere = torch.tensor(capacity * 2 * WINDOW)
        self._state = torch.zeros(capacity, COLUMNS, dtype=torch.float64)
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

    def set_warmup(self, slots: Tensor, warmup_tokens: int) -> None:
        """Change where the calibration of slots [B] ends; the draft tokens verified so far count towards it."""
        self._state[slots, WARMUP] = float(warmup_tokens)

    def append(
        self,
        slots: Tensor,
        drafted: Tensor,
        accepted: Tensor,
        temperature: Tensor,
        row: Tensor,
        kld: Tensor,
        kld_sum: Tensor,
        kld_max: Tensor,
        usable: Tensor,
    ) -> None:
        """Add one verification step of R distinct slots.

        slots, drafted, accepted: [R] int64. temperature: [R]. row: [N] int64, ascending, the r that owns each position.
        kld: [N] nats. kld_sum, kld_max: [R] float64, per request. usable: [R] bool; a request that is not usable keeps
        its signals, but its draft tokens still count towards the calibration. Only the newest WINDOW positions stay.
        """
        head, filled, verified, accepted_max, pre_sum, pre_count, pre_max, full_steps, last, _, warmup = (
            self._state.index_select(0, slots).unbind(1)
        )
        count = torch.where(usable, drafted, 0)
        start = head.long()

        position = torch.arange(row.numel()) - (drafted.cumsum(0) - drafted).index_select(0, row)
        age = drafted.index_select(0, row) - position
        cell = slots.index_select(0, row) * (2 * WINDOW) + (start.index_select(0, row) + position) % WINDOW
        cell = torch.where(usable.index_select(0, row) & (age <= WINDOW), cell, self._nowhere)
        self._ring[cell] = kld
        self._ring[cell + WINDOW] = kld

        warm = verified < warmup
        measured = usable & warm
        full = (drafted > 0) & (accepted == drafted)
        new = (
            (start + count) % WINDOW,
            (filled + count).clamp_(max=WINDOW),
            verified + drafted,
            torch.where(warm, torch.maximum(accepted_max, accepted), accepted_max),
            torch.where(measured, pre_sum + kld_sum, pre_sum),
            torch.where(measured, pre_count + count, pre_count),
            torch.where(measured, torch.maximum(pre_max, kld_max), pre_max),
            full_steps + (warm & full),
            torch.where(usable, kld_sum / count, last),
            temperature,
            warmup,
        )
        self._state.index_copy_(0, slots, torch.stack([column.double() for column in new], dim=1))

    def recent(self, slots: Tensor) -> Recent:
        """The history of slots [B], KLDs in order of age."""
        head, filled, verified, accepted_max, pre_sum, pre_count, pre_max, full_steps, last, temperature, warmup = (
            self._state.index_select(0, slots).unbind(1)
        )
        return Recent(
            kld=self._runs.index_select(0, slots * (2 * WINDOW) + head.long()),
            count=filled.long(),
            kld_last=last,
            temperature=temperature,
            calibrating=verified < warmup,
            accepted_max=accepted_max,
            full_steps=full_steps,
            kld_mean_pre=pre_sum / pre_count.clamp(min=1.0),
            kld_max_pre=pre_max,
        )
