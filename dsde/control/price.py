"""The price of time: how deep a batch should draft, and how likely a slot must be to survive to be worth verifying."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsde.control.arrays import Floats

__all__ = ["Costs", "Price", "best_price"]

ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one step in ms. plain: decoding the batch's n requests. token: one more token. draft: one draft step."""

    plain: float
    token: float
    draft: float


@dataclass(frozen=True, slots=True)
class Price:
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
    sure = np.add.reduce(resolved, 0)
    unresolved = np.stack((survival - resolved, 1.0 - share))
    for _ in range(ITERATIONS):
        threshold = rate * costs.token
        taken = survival > threshold
        open_gain, open_count = np.add.reduce(unresolved * taken, 1)
        emitted, count = sure + open_gain, sure + open_count
        value = np.add.accumulate(emitted - threshold * count - rate * costs.draft)
        best = int(value.argmax()) if value.size else -1
        if best < 0 or value[best] <= 0.0:
            break
        depth = best + 1
        tokens = requests + float(emitted[:depth].sum())
        time = costs.plain + costs.token * float(count[:depth].sum()) + costs.draft * depth
        if tokens / time <= rate * (1.0 + 1e-6):
            break
        rate = tokens / time
    return Price(rate, depth)
