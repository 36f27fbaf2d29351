"""The baselines, worked by hand: AdaEDL's lambda and its cut, the schedule by batch size, DSDE without its cap."""

import pickle
from typing import Any

import numpy as np
import pytest

from dsde.control.controller import Controller
from dsde.control.policies import build_policy
from dsde.control.policies.adaedl import AdaEdl, AdaEdlSettings, EntropyStop
from dsde.control.policies.base import Step
from dsde.control.records import SpeculationPlan, StepObservation


def verified(slots: list[int], drafted: list[int], accepted: list[int]) -> Step:
    return Step(
        slots=np.array(slots),
        drafted=np.array(drafted),
        accepted=np.array(accepted),
        size=len(slots),
        verify_ms=1.0,
        draft_ms=0.0,
        plain_ms=1.0,
    )


def adaedl(**settings: Any) -> AdaEdl:
    policy = AdaEdl(AdaEdlSettings(**settings), 8)
    policy.attach(4)
    return policy


def test_lambda_by_hand() -> None:
    policy = adaedl(threshold=0.4)
    # r = .5 * .9 + .5 * .5 = .7 < .9: lambda' = .41, lambda = .9 * .4 + .1 * .41 = .401.
    policy.observe(verified([0, 1], [4, 0], [2, 0]))
    assert policy._threshold.tolist() == pytest.approx([0.401, 0.4, 0.4, 0.4])
    # r = .35 + .5 = .85 < .9, though all were accepted: .402.
    policy.observe(verified([0], [3], [3]))
    assert policy._threshold[0].item() == pytest.approx(0.402)
    # r = .925 > .9 and all accepted: down to .401.
    policy.observe(verified([0], [3], [3]))
    assert policy._threshold[0].item() == pytest.approx(0.401)
    # r = .4625 + .5 * .9 = .9125 > .9, but not all accepted: stays.
    policy.observe(verified([0], [10], [9]))
    assert policy._threshold[0].item() == pytest.approx(0.401)
    policy.start(np.array([0]))
    assert policy._threshold[0].item() == 0.4


def observe(controller: Controller, plan: SpeculationPlan, entropy: list[list[float]]) -> None:
    ids = tuple(plan.lengths)
    none = np.zeros(len(ids), dtype=np.int64)
    table = np.array(entropy, dtype=np.float32)
    empty = np.zeros(0)
    controller.observe(
        StepObservation(ids, none, none, empty, empty, np.zeros(len(ids)), 1.0, ids, np.full_like(table, 0.5), table),
        plan,
    )


def test_a_request_is_cut_before_its_first_doubtful_slot_and_keeps_one() -> None:
    # lambda .4, gamma .5: 1 - sqrt(H / 2) >= .4 iff H <= .72.
    controller = Controller("adaedl", capacity=3, max_length=8, trims=True)
    plan = controller.plan(["a", "b", "c"], [99, 99, 99])
    assert dict(plan.lengths) == {"a": 7, "b": 7, "c": 7}
    observe(controller, plan, [[0.1, 0.7, 0.73, 0.1], [0.9, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.71]])
    # c drafted no more than 4.
    assert dict(controller.trim(plan, {"a": 99, "b": 99, "c": 3}).lengths) == {"a": 2, "b": 1, "c": 3}


def test_the_loop_ends_when_everybody_has_stopped() -> None:
    controller = Controller("adaedl", {"length": 3}, capacity=2, max_length=8, trims=True)
    plan = controller.plan(["a", "b"], [99, 2])
    assert isinstance(plan.stop, EntropyStop)
    rule = pickle.loads(pickle.dumps(plan.stop)).bind(["b", "stranger", "a"])
    low, high = np.array([[0.1, 0.1, 0.1], [0.1, 0.1, 0.8]], dtype=np.float32)
    assert rule.goes_on(0, low, low).tolist() == [True, False, True]
    assert rule.goes_on(0, low, high).tolist() == [True, False, False]
    # b has room for 2, a drafts 3.
    assert rule.goes_on(1, low, low).tolist() == [False, False, True]
    assert rule.goes_on(2, low, low).tolist() == [False, False, False]


def test_without_trim_adaedl_drafts_its_base_length() -> None:
    controller = Controller("adaedl", capacity=1, max_length=8)
    plan = controller.plan(["a"], [99])
    assert (plan.depth, plan.stop) == (7, None)


def test_the_schedule_by_batch_size() -> None:
    # JSON writes keys as strings.
    policy = build_policy("batch_schedule", {"table": {"4": 3, 1: 6, 16: 0}}, 8)
    assert [policy.length(size) for size in (1, 3, 4, 15, 16, 400)] == [6, 6, 3, 3, 0, 0]  # type: ignore[attr-defined]
    controller = Controller("batch_schedule", {"table": {1: 6, 2: 3}}, capacity=2, max_length=8)
    assert dict(controller.plan(["a"], [99]).lengths) == {"a": 6}
    assert dict(controller.plan(["a", "b"], [99, 2]).lengths) == {"a": 3, "b": 2}


def test_the_schedule_counts_requests_of_other_policies() -> None:
    controller = Controller("batch_schedule", {"table": {1: 6, 2: 3}}, capacity=2, max_length=8)
    controller.admit("a", policy="autoregressive")
    assert dict(controller.plan(["a", "b"], [99, 99]).lengths) == {"a": 0, "b": 3}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("batch_schedule", {}, r"settings\.table is missing: policy 'batch_schedule' needs it"),
        ("batch_schedule", {"table": {}}, r"table \{\} .* a mapping of batch size to length"),
        ("batch_schedule", {"table": 3}, r"table 3 .* a mapping"),
        ("batch_schedule", {"table": {"x": 3}}, r"table 'x' .* an integer from 1"),
        ("batch_schedule", {"table": {1: 9}}, r"table\[1\] 9 .* an integer from 0 to 8"),
        ("adaedl", {"gamma": -1}, r"gamma -1 .* a number from 0"),
        ("adaedl", {"length": 9}, r"length 9 .* from 0 to 8"),
        ("paper", {"cap": 1}, r"cap 1 .* give true or false"),
        ("goodput", {"length": 1}, r"length 1 .*'goodput': it takes none"),
    ],
)
def test_bad_settings_are_named(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_policy(name, settings, 8)


def test_without_a_cap_the_longest_prediction_runs() -> None:
    for preset in ("paper", "reference"):
        controller = Controller(
            preset, {"warmup_tokens": 2, "warmup_length": 9, "cap": False}, capacity=3, max_length=16
        )
        plan = controller.plan("abc", [99] * 3)
        drafted = np.array(list(plan.lengths.values()))
        total = int(drafted.sum())
        # KLD 0: no penalty, SL_max = SL_A,max, which is 2, 3 and 7; the mean would cut the last to 4.
        controller.observe(
            StepObservation(
                ("a", "b", "c"), drafted, np.array([2, 3, 7]), np.zeros(total), np.ones(total), np.zeros(3)
            ),
            plan,
        )
        assert list(controller.plan("abc", [99] * 3).lengths.values()) == [2, 3, 7]
