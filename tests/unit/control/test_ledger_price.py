"""The ledger's balance and the price of a step, worked by hand and against a search over every choice."""

import itertools
import random

import numpy as np
import pytest

from dsde.control.ledger import Ledger
from dsde.control.price import Costs, best_price


def test_the_balance_by_hand() -> None:
    ledger = Ledger(bound=0.01)
    # Opens at 2 * 10; a step of 18 ms that emitted 1.5 per request was worth 15: 20 + 15 - 18 = 17.
    ledger.book(10.0, 1.5, 18.0, 16)
    assert ledger.balance == pytest.approx(17.0)
    # 17 + 40 - 15 = 42 stays under the ceiling of 50, the next gain does not.
    ledger.book(10.0, 4.0, 15.0, 16)
    assert ledger.balance == pytest.approx(42.0)
    ledger.book(10.0, 4.0, 15.0, 16)
    assert ledger.balance == pytest.approx(50.0)


def test_a_small_batch_may_have_more_bad_luck() -> None:
    ledger = Ledger()
    ledger.book(10.0, 1.0, 10.0, 4)
    assert ledger.balance == pytest.approx(2 * 10.0 * 2)
    ledger.book(10.0, 100.0, 10.0, 4)
    assert ledger.balance == pytest.approx(5 * 10.0 * 2)


def test_it_is_overdrawn_below_its_share_of_the_plain_time() -> None:
    ledger = Ledger(bound=0.01)
    ledger.book(10.0, 1.0, 30.2, 16)
    # -.2 against 1 % of 10 ms.
    assert ledger.balance == pytest.approx(-0.2)
    assert ledger.overdrawn
    ledger.rest(10.0)
    # 1 % of 20 ms is .2, and -.2 is not below it; resting gained nothing.
    assert ledger.balance == pytest.approx(-0.2)
    ledger.rest(10.0)
    assert not ledger.overdrawn


def brute(survival: list[list[float]], requests: int, costs: Costs) -> tuple[float, int]:
    """The best rate over all depths and all prefixes of every request."""
    depths = range(len(survival[0]) + 1)
    best = (requests / costs.plain, 0)
    for kept in itertools.product(depths, repeat=len(survival)):
        emitted = requests + sum(sum(row[:k]) for row, k in zip(survival, kept, strict=True))
        time = costs.plain + costs.token * sum(kept) + costs.draft * max(kept)
        best = max(best, (emitted / time, max(kept)), key=lambda found: found[0])
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_price_is_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    rows = [list(itertools.accumulate([rng.random() for _ in range(4)], lambda a, b: a * b)) for _ in range(3)]
    costs = Costs(plain=rng.uniform(5, 100), token=rng.uniform(0, 8), draft=rng.uniform(0.1, 12))
    survival = np.array(rows)
    price = best_price(survival, np.zeros_like(survival), 3, costs)
    rate, depth = brute(rows, 3, costs)
    assert price.rate == pytest.approx(rate, rel=1e-3)
    assert price.depth == depth


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_drafted_exactly_when_plain_decoding_is_faster(seed: int) -> None:
    rng = random.Random(100 + seed)
    chance = rng.uniform(0.1, 0.9)
    requests = rng.choice([1, 4, 32])
    costs = Costs(plain=112 + 6.8 * requests, token=6.8, draft=13.4 + 2.07 * requests)
    survival = np.array([[chance**j for j in range(1, 6)]] * requests)
    rates = []
    for k in range(1, 6):
        emitted = requests * sum(chance**j for j in range(k + 1))
        rates.append(emitted / (costs.plain + costs.token * requests * k + costs.draft * k))
    price = best_price(survival, np.zeros_like(survival), requests, costs)
    assert (price.depth > 0) == (max(rates) > requests / costs.plain * (1 + 1e-9))


def test_confidence_that_will_tell_makes_drafting_pay() -> None:
    # Survival .4 costs more than it brings at a token price of .5: nothing. Known in advance which .4 survive, each of
    # 10 requests brings .4 (1 - .5) = .2 tokens for a draft step of .1 * 10 / 10.
    survival = np.full((10, 1), 0.4)
    costs = Costs(plain=10.0, token=0.5, draft=0.5)
    assert best_price(survival, np.zeros_like(survival), 10, costs).depth == 0
    price = best_price(survival, np.ones_like(survival), 10, costs)
    # 14 tokens in 10 + .5 * 4 + .5 = 12.5 ms.
    assert (price.depth, price.rate) == (1, pytest.approx(14 / 12.5))


def test_without_slots_to_draft_the_price_is_that_of_plain_decoding() -> None:
    nothing = np.empty((4, 0))
    assert best_price(nothing, nothing, 4, Costs(plain=10.0, token=0.5, draft=0.5)) == (0.4, 0)
