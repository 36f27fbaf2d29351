"""How the benchmark's time is spent: a share for each scene, then tokens and rounds that fit into the share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from dsde.bench.cell import Scene

__all__ = ["FEWEST_TOKENS", "hopeless", "shares", "tokens_that_fit", "weight"]

FEWEST_TOKENS = 12
"""Tokens per request below which a run says little: most of it would be the controller's calibration."""

# A verification of the bench pair, in units of its cost per token: 112 ms + 6.8 ms per token.
STEP_IN_TOKENS = 16.5
# A fixed length this far behind the best one is not going to be the best one.
BEHIND = 0.85


def weight(scene: Scene) -> float:
    """Relative duration of a scene's runs, before anything is measured."""
    return scene.waves * sum(STEP_IN_TOKENS + batch for batch in scene.load)


def shares(seconds: float, scenes: Sequence[Scene]) -> list[float]:
    """`seconds` shared out over the scenes that are still to come, by their weight."""
    total = sum(map(weight, scenes))
    return [seconds * weight(scene) / total for scene in scenes]


def tokens_that_fit(share_s: float, runs: int, setup_s: float, token_s: float, most: int) -> int:
    """Tokens per request so that one round of `runs` runs fits into share_s; from FEWEST_TOKENS to `most`.

    setup_s: seconds of a run outside the measured decoding. token_s: seconds in which every request gets a token.
    """
    if math.isinf(share_s):
        return most
    fitting = (share_s / runs - setup_s) / token_s
    return int(min(most, max(FEWEST_TOKENS, fitting)))


def hopeless(ratios: dict[int, float], lengths: Sequence[int]) -> set[int]:
    """Fixed lengths not worth more time: 15 % behind the best, or longer than two in a row that are.

    ratios: length -> throughput ratio so far. lengths: all of them, ascending. Throughput has one peak over the length,
    so what lies beyond two such lengths is further down.
    """
    if not ratios:
        return set()
    best = max(ratios.values())
    out = {length for length, ratio in ratios.items() if ratio < BEHIND * best}
    for position, (first, second) in enumerate(itertools.pairwise(lengths)):
        if {first, second} <= out and first > max(ratios, key=ratios.__getitem__):
            return out | set(lengths[position + 2 :])
    return out
