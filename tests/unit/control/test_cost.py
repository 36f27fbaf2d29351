"""Step costs learnt while serving: right under noise, untouched by pauses and prefills."""

import random

import pytest

from dsde.control.cost import Curve, StepCost


def clean(cost: StepCost, tokens: int, step_ms: float) -> bool:
    return cost.learn(tokens, step_ms, False, 0, 0, None).measured


def test_a_and_b_are_recovered_under_noise() -> None:
    rng = random.Random(3)
    curve = Curve((1.0, 0.005), 64)
    for _ in range(400):
        tokens = rng.randint(1, 40)
        curve.learn(tokens, (112.0 + 6.8 * tokens) * (1 + rng.gauss(0, 0.05)))
    a, b = curve.line
    assert a == pytest.approx(112.0, rel=0.05)
    assert b == pytest.approx(6.8, rel=0.05)


def test_two_sizes_without_noise_give_the_line() -> None:
    # 20 ms at 4 tokens and 26 ms at 16: b = .5, a = 18; the prior's pull is gone after some tens of steps.
    curve = Curve((1.0, 0.005), 32)
    for _ in range(60):
        curve.learn(4, 20.0)
        curve.learn(16, 26.0)
    assert curve.line == pytest.approx((18.0, 0.5), rel=0.04)
    assert curve.at(4) == pytest.approx(20.0, rel=0.005)
    assert curve.at(16) == pytest.approx(26.0, rel=0.005)


def test_a_load_that_never_varies_keeps_the_slope_that_was_learnt() -> None:
    curve = Curve((1.0, 0.005), 32)
    for _ in range(60):
        curve.learn(4, 20.0)
        curve.learn(16, 26.0)
    slope = curve.line[1]
    for _ in range(3000):
        curve.learn(4, 20.0)
    assert curve.line[1] == pytest.approx(slope, rel=0.02)


def test_one_size_alone_keeps_the_shape_of_the_prior() -> None:
    # 10.05 ms at one token = 10 (1 + .005): unidentified, so a = 10 and b = .05.
    curve = Curve((1.0, 0.005), 32)
    for _ in range(50):
        curve.learn(1, 10.05)
    assert curve.line == pytest.approx((10.0, 0.05), rel=1e-6)


def test_prompts_have_a_price_of_their_own() -> None:
    rng = random.Random(4)
    cost = StepCost(8, 4)

    def read(tokens: int, decoding: int, factor: float = 1.0) -> None:
        step_ms = 40.0 + decoding + 3.0 * tokens * factor * (1 + rng.gauss(0, 0.05))
        cost.learn(decoding, step_ms, True, 0, 0, None, prompt_tokens=tokens)

    read(100, 0)
    assert cost.prompt is None
    for _ in range(50):
        for tokens in (2, 6):
            clean(cost, tokens, 40.0 + tokens)
    for _ in range(40):
        read(rng.randint(5, 200), rng.randint(0, 6))
    assert cost.prompt == pytest.approx(3.0, rel=0.05)
    read(100, 2, factor=50.0)
    assert cost.prompt is not None
    assert cost.prompt < 6.0
    for _ in range(40):
        read(60, 2, factor=2.0)
    assert cost.prompt == pytest.approx(6.0, rel=0.05)
    # A step that took no longer than its decoding costs nothing more.
    cost.learn(2, 30.0, True, 0, 0, None, prompt_tokens=5)
    assert 0.0 < cost.prompt < 6.3


def test_pauses_and_prefills_are_ignored() -> None:
    cost = StepCost(8, 4)
    for _ in range(50):
        for tokens in (2, 10):
            assert clean(cost, tokens, 40.0 + tokens)
    before = cost.verify(2), cost.verify(10), cost.token(2)
    pause = cost.learn(2, 42.0 * 4.5, False, 0, 0, None)
    assert not pause.measured
    assert pause.verify == pytest.approx(42.0, rel=0.01)
    prefill = cost.learn(500, 90.0, True, 2, 3, 300.0)
    assert not prefill.measured
    assert (cost.verify(2), cost.verify(10), cost.token(2)) == before


def test_a_step_of_prompts_alone_has_no_pace() -> None:
    # Times that grow faster than sizes leave a = 0, so that no tokens take no time.
    cost = StepCost(8, 4)
    for _ in range(60):
        for tokens in range(1, 9):
            cost.learn(tokens, 2.0 * tokens**2, False, 0, 0, None)
    assert cost.line[0] == 0.0
    assert cost.learn(0, 5.0, True, 0, 0, None).pace == 1.0


def test_the_pace_is_what_lies_beyond_doubt() -> None:
    cost = StepCost(8, 4)
    for _ in range(50):
        assert cost.learn(2, 40.0, False, 0, 0, None).pace == 1.0
    # Up to a quarter off is no news.
    slow = cost.learn(2, 60.0, False, 0, 0, None)
    assert slow.pace == pytest.approx(60.0 / cost.verify(2) / 1.25)
    assert slow.pace > 1.1
    fast = cost.learn(2, 20.0, False, 0, 0, None)
    assert fast.pace == pytest.approx(20.0 / cost.verify(2) * 1.25)
    assert fast.pace < 0.7


def test_a_machine_that_became_five_times_slower_is_believed_after_eight_steps() -> None:
    curve = Curve((1.0, 0.005), 8)
    for _ in range(50):
        curve.learn(1, 10.0)
    for _ in range(7):
        assert not curve.learn(1, 50.0)
    assert curve.at(1) == pytest.approx(10.0, rel=0.01)
    assert curve.learn(1, 50.0)
    assert curve.at(1) == pytest.approx(50.0, rel=0.01)


def test_a_first_step_that_compiles_does_not_stay() -> None:
    curve = Curve((1.0, 0.005), 8)
    curve.learn(1, 4000.0)
    for _ in range(20):
        curve.learn(1, 10.0)
    assert curve.at(1) == pytest.approx(10.0, rel=0.02)


def test_costs_are_never_negative() -> None:
    falling = Curve((1.0, 0.005), 32)
    rising = Curve((1.0, 0.005), 32)
    for _ in range(200):
        for tokens in (10, 30):
            falling.learn(tokens, 30.0 - tokens / 2)
            rising.learn(tokens, 10.0 * tokens - 15.0)
    assert falling.line[1] == 0.0
    assert falling.line[0] > 0.0
    assert rising.line[0] == 0.0
    assert rising.line[1] > 0.0


def test_a_staircase_is_followed_where_it_was_seen() -> None:
    # 10 ms up to 8 tokens, 20 ms beyond: a line through it is far off at 8 and 9.
    curve = Curve((1.0, 0.005), 32)
    for _ in range(100):
        for tokens in (1, 4, 8, 9, 12, 16):
            curve.learn(tokens, 10.0 if tokens <= 8 else 20.0)
    assert curve.at(8) == pytest.approx(10.0, rel=0.12)
    assert curve.at(9) == pytest.approx(20.0, rel=0.12)


def test_draft_steps_by_batch_size_and_between() -> None:
    cost = StepCost(32, 4)
    for _ in range(100):
        cost.learn(8, 120.0, False, 1, 3, 15.5)
        cost.learn(8, 120.0, False, 24, 3, 63.0)
    assert cost.draft(1) == pytest.approx(15.5, rel=0.03)
    assert cost.draft(24) == pytest.approx(63.0, rel=0.03)
    # Between them the line: 15.5 + 11.5/23 * 47.5 = 39.25 at 12.5.
    assert (cost.draft(12) + cost.draft(13)) / 2 == pytest.approx(39.25, rel=0.05)


def test_what_stopping_costs_is_kept_apart() -> None:
    cost = StepCost(4, 4)
    for _ in range(50):
        cost.learn(4, 40.0, False, 4, 3, 2.0)
        cost.learn(4, 40.0, False, 4, 2, 2.6, stoppable=True)
    assert cost.draft(4) == pytest.approx(2.0, rel=0.01)
    assert cost.sync == pytest.approx(0.6, rel=0.1)


def test_before_anything_is_measured_only_the_shape_is_known() -> None:
    cost = StepCost(4, 4)
    assert (cost.verify(2), cost.token(2), cost.draft(2), cost.sync) == (1.01, 0.005, 0.12, 0.0)
    cost.learn(2, 10.1, False, 0, 0, None)
    assert cost.draft(2) == pytest.approx(1.2)


def test_plain_steps_are_known_from_speculative_ones() -> None:
    # One step at 32 tokens, one at 95, then 60 to 64 for ever: the line still passes through 329.6 ms at 32.
    curve = Curve((1.0, 0.005), 352)
    for tokens in (32, 95, *(60 + index % 5 for index in range(40))):
        curve.learn(tokens, 112.0 + 6.8 * tokens)
    assert curve.at(32) == pytest.approx(329.6, rel=0.01)


def test_the_price_of_a_token_is_that_of_the_batch_size() -> None:
    # 200 ms up to 4 tokens, 15 ms for each one more: flat for one request with three drafts, steep for four with one.
    cost = StepCost(8, 4)
    for _ in range(200):
        for tokens in (1, 4):
            cost.learn(tokens, 200.0, False, 0, 0, None, requests=1)
    assert cost.token(1) < 1.0
    for _ in range(8):
        cost.learn(8, 260.0, False, 0, 0, None, requests=4)
    assert cost.line[1] < 3.0
    assert cost.token(4) > 8.0
    assert cost.token(1) < 3.0
    for _ in range(30):
        cost.learn(8, 260.0, False, 0, 0, None, requests=4)
    assert cost.token(4) == pytest.approx(15.0, rel=0.25)


def test_no_times_make_a_step_free() -> None:
    # A machine that gets faster by leaps: the nearest admissible line passes through the origin and is flat.
    cost = StepCost(32, 8)
    times = ((2, 8.4), (4, 7.8), (21, 1.1), (12, 3.2), (2, 38.8), (21, 4.5), (2, 2.3), (21, 6.2), (36, 0.7), (36, 0.7))
    for tokens, step_ms in times:
        assert cost.learn(tokens, step_ms, False, 0, 0, None).verify > 0.0
        assert cost.verify(1) >= 0.0 < cost.verify(36)
