"""Each term of the score moves the choice the right way; figures by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dsde.routing.score import ACCEPTANCE, DEEPEST, Fleet, Wanted, level, losses

LOW, HIGH = 0, level(0.9)


def fleet(replicas: int = 2, *, base: float = 20.0, token: float = 0.1, draft: float = 1.5, places: int = 32) -> Fleet:
    made = Fleet.empty(replicas)
    made.base[:], made.token[:], made.draft[:], made.places[:], made.depth[:] = base, token, draft, places, -1
    made.prompt[:] = token
    return refreshed(made)


def refreshed(made: Fleet) -> Fleet:
    for row in range(len(made.base)):
        made.refresh(row)
    return made


def wanted(made: Fleet, output: float = 100.0, of: int = LOW, prompt: float = 0.0) -> Wanted:
    return Wanted(output, of, np.full(len(made.base), prompt))


def best(made: Fleet, one: Wanted) -> int:
    return int(losses(made, one).total.argmin())


def test_an_idle_replica_s_loss_is_its_own_time() -> None:
    made = fleet(1, draft=1e6)
    found = losses(made, wanted(made, output=100, prompt=50))
    # 50 prompt tokens, then 100 steps of one token: 0.1 * 50 + 100 * (20 + 0.1).
    assert found.own[0] == pytest.approx(5.0 + 2010.0)
    assert found.others[0] == 0.0


def test_others_lose_what_one_more_token_costs() -> None:
    made = fleet(1, draft=1e6)
    made.members[0, LOW] = 4.0
    found = losses(refreshed(made), wanted(made, output=100, prompt=50))
    step = 20.0 + 0.1 * 5
    # Each of the four waits for the prompt, and runs at 20.4 / 20.5 of its speed while the request is there.
    assert found.others[0] == pytest.approx(4 * 5.0 + 100 * step * 4 * (1 - 20.4 / 20.5))


def test_fewer_members_are_better() -> None:
    made = fleet()
    made.members[0, LOW] = 6.0
    assert best(refreshed(made), wanted(made)) == 1


def test_a_slow_replica_is_left_alone_until_the_other_is_much_fuller() -> None:
    made = fleet()
    made.base[0] *= 2.0
    made.token[0] *= 2.0
    made.members[1, LOW] = 3.0
    assert best(refreshed(made), wanted(made)) == 1
    made.members[1, LOW] = 70.0
    assert best(refreshed(made), wanted(made)) == 0


def test_prompts_still_to_be_read_count() -> None:
    made = fleet()
    made.busy[0] = 500.0
    assert best(made, wanted(made)) == 1


def test_a_cached_prefix_counts() -> None:
    made = fleet()
    made.members[1, LOW] = 2.0
    refreshed(made)
    assert best(made, Wanted(100.0, LOW, np.array([2000.0, 2000.0]))) == 0
    assert best(made, Wanted(100.0, LOW, np.array([2000.0, 100.0]))) == 1


def test_a_full_batch_makes_wait() -> None:
    made = fleet(places=4)
    made.members[0, LOW], made.members[1, LOW] = 4.0, 3.0
    found = losses(refreshed(made), wanted(made))
    # A whole turn of the four places is shared among them: a quarter of the request's own time.
    assert found.own[0] > 1.2 * found.own[1]


@pytest.mark.parametrize(("one", "where"), [(LOW, 0), (HIGH, 1)])
def test_like_goes_to_like_so_that_nobody_waits_for_a_straggler(one: int, where: int) -> None:
    made = fleet()
    made.members[0, LOW] = made.members[1, HIGH] = 8.0
    assert best(refreshed(made), wanted(made, of=one)) == where


def test_free_drafts_leave_no_stragglers() -> None:
    made = fleet(draft=0.0, token=0.0)
    made.members[0, LOW] = made.members[1, HIGH] = 8.0
    found = losses(refreshed(made), wanted(made))
    assert found.total[0] == pytest.approx(found.total[1])


def test_a_depth_that_is_fixed_is_not_priced() -> None:
    made = fleet(2, draft=4.0)
    made.depth[:] = (0.0, 4.0)
    found = losses(refreshed(made), wanted(made, output=10))
    assert found.own[0] == pytest.approx(10 * 20.1)
    emitted = sum(ACCEPTANCE[LOW] ** j for j in range(5))
    # A draft of 10 % acceptance is verified for one slot only.
    assert found.own[1] == pytest.approx(10 * (20.2 + 16.0) / emitted)


def test_levels_are_the_nearest() -> None:
    assert [level(rate) for rate in (0.0, 0.12, 0.39, 0.66, 1.0)] == [0, 0, 2, 4, len(ACCEPTANCE) - 1]


def test_no_depth_beyond_the_deepest_is_read() -> None:
    made = fleet(1, draft=0.0, token=0.0)
    made.members[0, HIGH] = 1.0
    found = losses(refreshed(made), wanted(made, output=100, of=HIGH))
    assert found.own[0] == pytest.approx(100 * 20.0 / sum(ACCEPTANCE[HIGH] ** j for j in range(DEEPEST + 1)))
