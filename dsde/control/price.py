"""The price of time: how deep a batch should draft, and how likely a slot must be to survive to be worth verifying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsde.control.arrays import ONE, Floats

__all__ = ["Costs", "Price", "best_price"]

ITERATIONS = 4


class Costs(NamedTuple):
    """Costs of one step in ms. plain: decoding the batch's n requests. token: one more token. draft: one draft step."""

    plain: float
    token: float
    draft: float


class Price(NamedTuple):
    """rate: tokens per ms expected of the whole batch, the best that any depth reaches. depth: that depth, draft steps.

    A slot is worth verifying iff its survival exceeds rate * token.
    """

    rate: float
    depth: int


def best_price(survival: Floats, share: Floats, requests: int, costs: Costs) -> Price:
    """Dinkelbach's iteration on rate = E / T over depths.

    survival: [B, L], chance that the slot and all before it are accepted; 0 where the request has no room. share:
    [B, L], part of the survival's variance that drafting will resolve. requests: n >= B that decode, each of which
    emits one token anyway. A slot whose survival m is resolved is 1 with chance m and else 0, so at threshold h it
    brings share * m (1 - h) + (1 - share) * max(0, m - h).
    """
    rate, depth = requests / costs.plain, 0
    resolved = share * survival
    sure = np.add.reduce(resolved, 0).tolist()
    # Tokens and counts that the threshold decides, one above the other.
    unresolved = np.empty((2, *survival.shape))
    np.subtract(survival, resolved, out=unresolved[0])
    np.subtract(ONE, share, out=unresolved[1])
    decided: bytes | None = None
    for _ in range(ITERATIONS):
        threshold = rate * costs.token
        above = (survival > threshold).astype(np.float64)
        if above.tobytes() != decided:
            decided = above.tobytes()
            decisions = zip(*np.vecdot(unresolved.swapaxes(1, 2), above.T).tolist(), sure, strict=True)
            slots = [(tokens + fixed, count + fixed) for tokens, count, fixed in decisions]
        best, emitted, count = _best_depth(slots, threshold, rate, costs.draft)
        if not best:
            break
        depth = best
        tokens = requests + emitted
        time = costs.plain + costs.token * count + costs.draft * depth
        if tokens / time <= rate * (1.0 + 1e-6):
            break
        rate = tokens / time
    return Price(rate, depth)


def _best_depth(
    slots: Sequence[tuple[float, float]], threshold: float, rate: float, draft: float
) -> tuple[int, float, float]:
    """The depth that gains most, 0 where none gains, and the tokens and counts expected up to it.

    slots: the batch's expected tokens and counts in each slot position. A count costs `threshold` tokens.
    """
    best, gain = (0, 0.0, 0.0), 0.0
    emitted = count = 0.0
    for depth, (slot_emitted, slot_count) in enumerate(slots, 1):
        emitted += slot_emitted
        count += slot_count
        value = emitted - threshold * count - rate * (draft * depth)
        if value > gain:
            best, gain = (depth, emitted, count), value
    return best
