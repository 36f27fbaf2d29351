"""Which prefixes were sent where, as far as replicas may still cache them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["Prefixes"]

REMEMBERED = 16_384
"""Blocks that are remembered, all replicas together."""
HOLDERS = 4
"""Replicas that are remembered for one block, the newest."""


class Prefixes:
    """Blocks of prompts and the rows of the replicas that read them last; memory is bounded."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._holders: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def matched(self, blocks: Sequence[int]) -> dict[int, int]:
        """Leading blocks by row, for the rows that have read the first one at least."""
        found: dict[int, int] = {}
        alive: tuple[int, ...] = ()
        for count, block in enumerate(blocks):
            holders = self._holders.get(block, ())
            if holders == alive and count:
                continue
            kept = tuple(row for row in alive if row in holders) if count else holders
            found.update((row, count) for row in alive if row not in kept)
            alive = kept
            if not alive:
                break
        found.update((row, len(blocks)) for row in alive)
        return found

    def sent(self, blocks: Sequence[int], row: int) -> None:
        """A prompt of these blocks went to `row`."""
        for block in blocks:
            others = [one for one in self._holders.pop(block, ()) if one != row]
            self._holders[block] = (*others, row)[-HOLDERS:]
        while len(self._holders) > self._remembered:
            self._holders.popitem(last=False)

    def forget(self, row: int) -> None:
        """The replica of this row is gone, and its cache with it."""
        for block, holders in list(self._holders.items()):
            if row in holders:
                left = tuple(one for one in holders if one != row)
                if left:
                    self._holders[block] = left
                else:
                    del self._holders[block]
