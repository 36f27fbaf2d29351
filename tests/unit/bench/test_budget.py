from __future__ import annotations

import math

import pytest

from dsde.bench.budget import FEWEST_TOKENS, hopeless, shares, tokens_that_fit
from dsde.bench.cell import Scene

LENGTHS = (1, 2, 3, 4, 6, 8, 10)


def test_shares_follow_the_cost_of_a_step() -> None:
    small, large = shares(110.0, [Scene((1,), 0.0, "mix"), Scene((8,), 0.0, "mix")])
    # Four times 16.5 + 1 against 16.5 + 8 token costs.
    assert small == pytest.approx(110 * 70 / 94.5)
    assert small + large == pytest.approx(110.0)
    assert shares(1.0, [Scene((1, 8), 0.0, "mix"), Scene((1,), 0.0, "mix")])[0] == pytest.approx(42 / 112)


def test_tokens_fill_the_share() -> None:
    # 10 runs in 100 s: 10 s each, 2 of them for the prompts, half a second a token.
    assert tokens_that_fit(100.0, 10, 2.0, 0.5, most=64) == 16
    assert tokens_that_fit(100.0, 10, 2.0, 0.1, most=64) == 64
    assert tokens_that_fit(10.0, 10, 2.0, 0.5, most=64) == FEWEST_TOKENS
    assert tokens_that_fit(math.inf, 10, 2.0, 0.5, most=64) == 64
    assert tokens_that_fit(10.0, 10, 2.0, 0.5, most=4) == 4


def test_two_bad_lengths_in_a_row_end_the_search() -> None:
    assert hopeless({}, LENGTHS) == set()
    assert hopeless({1: 1.1, 2: 1.2, 3: 1.1}, LENGTHS) == set()
    # 0.85 * 1.2 = 1.02: length 4 alone proves little about 6.
    assert hopeless({1: 1.1, 2: 1.2, 3: 1.1, 4: 1.0}, LENGTHS) == {4}
    assert hopeless({1: 1.1, 2: 1.2, 3: 1.01, 4: 1.0}, LENGTHS) == {3, 4, 6, 8, 10}
    # Below the best, what is bad says nothing about longer ones.
    assert hopeless({1: 1.0, 2: 1.1, 3: 1.4}, LENGTHS) == {1, 2}
