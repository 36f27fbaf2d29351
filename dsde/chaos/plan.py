"""Which fault comes when: nothing but the seed decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KINDS", "Planned", "plan"]

KINDS = {
    "engine": "kill an engine's process",
    "replica": "kill a replica, and its engine with it",
    "stall": "stop an engine's process, so that it lives and makes no step",
    "ingress": "kill the ingress, and the calls that it holds with it",
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault to come. at_s: seconds after the start. draw: 0 to 1, which picks one of those that it can hit."""

    at_s: float
    kind: str
    draw: float

    def victim(self, candidates: Sequence[int]) -> int:
        """One of the candidates' process ids, which must not be empty; their order does not matter."""
        return sorted(candidates)[int(self.draw * len(candidates))]


def plan(seed: int, kinds: Sequence[str], every_s: float, seconds: float) -> list[Planned]:
    """A fault of one of `kinds` every `every_s`, the last one no later than `seconds`."""
    draw = random.Random(seed)
    return [
        Planned(number * every_s, draw.choice(kinds), draw.random()) for number in range(1, int(seconds / every_s) + 1)
    ]
