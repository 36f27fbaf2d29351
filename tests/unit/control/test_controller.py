"""The controller over many steps: both presets against a plain re-implementation, and every figure of an answer."""

import math
import pickle
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from dsde.control.controller import Controller
from dsde.control.records import SpeculationPlan, StepObservation

NAN = math.nan


def observe(
    controller: Controller,
    steps: Mapping[str, tuple[int, Sequence[float]]],
    *,
    overlap: float = 0.5,
    temperature: Mapping[str, float] | None = None,
    plan: SpeculationPlan | None = None,
    draft_step_ms: float | None = None,
) -> None:
    """One verification step: request id -> (accepted, KLD of every verified draft token)."""
    klds = [kld for _, step in steps.values() for kld in step]
    controller.observe(
        StepObservation(
            request_ids=tuple(steps),
            num_draft_tokens=np.array([len(step) for _, step in steps.values()], dtype=np.int64),
            num_accepted_tokens=np.array([accepted for accepted, _ in steps.values()], dtype=np.int64),
            kld=np.array(klds, dtype=np.float32),
            overlap=np.array([NAN if math.isnan(kld) else overlap for kld in klds], dtype=np.float32),
            temperature=np.array([(temperature or {}).get(request, 0.0) for request in steps], dtype=np.float32),
            draft_step_ms=draft_step_ms,
        ),
        plan,
    )


def lengths(controller: Controller, ids: Sequence[str], room: int = 99) -> list[int]:
    plan = controller.plan(ids, [room] * len(ids))
    return [plan.lengths[request_id] for request_id in ids]


class Plain:
    """DSDE for one request, in plain Python from the paper and its table of differences."""

    def __init__(self, preset: str, temperature: float, limit: int) -> None:
        self.reference = preset == "reference"
        self.temperature, self.limit = temperature, limit
        self.klds: list[float] = []
        self.drafted = self.accepted_max = 0
        self.warmup = 2 if self.reference else 5
        self.pre: list[float] = []
        self.last = 0.0

    def learn(self, accepted: int, klds: list[float]) -> None:
        if self.drafted < 30:
            self.accepted_max = max(self.accepted_max, accepted)
            self.pre += klds
            if self.reference and klds and accepted == len(klds):
                self.warmup *= 2
        self.drafted += len(klds)
        self.klds = (self.klds + klds)[-30:]
        self.last = sum(klds) / len(klds) if klds else self.last

    def variance(self, values: list[float]) -> float:
        decay = 0.9 if self.reference else 0.85
        weights = [decay**age for age in reversed(range(len(values)))]
        mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        return sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / sum(weights)

    @property
    def calibrating(self) -> bool:
        return self.drafted < 30

    def predict(self) -> float:
        mean, most = sum(self.pre) / len(self.pre), max(self.pre)
        if self.reference:
            longest = float(min(self.limit, max(2, round(self.accepted_max * (1 + 0.5 * mean / most)))))
            shortest = float(max(2, math.ceil(0.1 * longest)))
            long = self.variance(self.klds)
            wvir = 20.0 if long < 1e-6 else self.variance(self.klds[-(len(self.klds) // 3) :]) / long
            kld = self.last / self.temperature if self.temperature else self.last
        else:
            longest, shortest = max(2.0, self.accepted_max * (1 + mean / most)), 2.0
            wvir = self.variance(self.klds[-10:]) / self.variance(self.klds)
            kld = self.last
        penalty = (math.exp(2 * kld) - 1) * wvir
        predicted = (1 - penalty) * (longest - shortest) + shortest if penalty <= 1 else shortest
        return min(predicted, self.limit)


def plain_plan(requests: list[Plain], room: list[int]) -> list[int]:
    ready = [r.predict() for r in requests if not r.calibrating]
    if requests[0].reference:
        cap = math.ceil(sum(map(math.ceil, ready)) / len(ready)) if ready else 0
        planned = [min(r.warmup, r.limit) if r.calibrating else min(math.ceil(r.predict()), cap) for r in requests]
    else:
        mean = sum(ready) / len(ready) if ready else 0.0
        planned = [
            min(r.warmup, r.limit) if r.calibrating else math.floor(min(r.predict(), mean) + 0.5) for r in requests
        ]
    return [min(length, most) for length, most in zip(planned, room, strict=True)]


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_a_trace_of_a_ragged_batch_equals_the_plain_rule(preset: str) -> None:
    rng = random.Random(7)
    temperatures = {"a": 0.0, "b": 0.7, "c": 1.5, "d": 1.0, "e": 0.0, "f": 0.3}
    steadiness = {"a": 0.02, "b": 0.1, "c": 0.2, "d": 0.3, "e": 0.6, "f": 0.05}
    limit = 10
    controller = Controller(preset, capacity=6, max_length=limit)
    plain = {request: Plain(preset, temperature, limit) for request, temperature in temperatures.items()}
    seen = set()
    for step in range(60):
        batch = [request for request in plain if step > 5 or request < "d"]
        rng.shuffle(batch)
        room = [rng.choice([99, 99, 99, 3]) for _ in batch]
        planned = list(controller.plan(batch, room).lengths.values())
        assert planned == plain_plan([plain[request] for request in batch], room), f"step {step}"
        seen.update(planned)
        observation = {}
        for request, length in zip(batch, planned, strict=True):
            # float32, as observations carry them.
            klds = np.array(
                [rng.expovariate(1 / steadiness[request]) for _ in range(length)], dtype=np.float32
            ).tolist()
            observation[request] = (rng.choice([length, rng.randint(0, length)]), klds)
            plain[request].learn(*observation[request])
        observe(controller, observation, temperature=temperatures)
    assert len(seen) >= 4


def test_the_cap_cuts_the_longest_and_is_counted() -> None:
    controller = Controller("paper", {"warmup_tokens": 2, "warmup_length": 9}, capacity=3, max_length=16)
    assert lengths(controller, "abc") == [9, 9, 9]
    # KLD 0: no penalty, SL_max = SL_A,max, which is 2, 3 and 7; mean 4.
    observe(controller, {"a": (2, [0.0] * 9), "b": (3, [0.0] * 9), "c": (7, [0.0] * 9)})
    assert lengths(controller, "abc") == [2, 3, 4]
    observe(controller, {"a": (2, [0.0] * 2), "b": (3, [0.0] * 3), "c": (4, [0.0] * 4)})
    # A step that no plan preceded was not capped again.
    observe(controller, {"a": (0, []), "b": (0, []), "c": (0, [])})
    # With only two tokens of room it is the room that cuts, not the cap: still one capped step, for c alone.
    assert lengths(controller, "abc", room=2) == [2, 2, 2]
    observe(controller, {"a": (2, [0.0] * 2), "b": (2, [0.0] * 2), "c": (2, [0.0] * 2)})
    figures = [controller.finish(request) for request in "abc"]
    assert [f.capped_steps for f in figures if f] == [0, 0, 1]
    assert [(f.length_mean, f.length_max) for f in figures if f] == [(13 / 4, 9), (14 / 4, 9), (15 / 4, 9)]


def test_plan_holds_every_request_and_the_longest_is_the_depth() -> None:
    controller = Controller("static", {"length": 3}, capacity=4, max_length=8)
    controller.admit("off", max_length=0)
    plan = controller.plan(["off", "on", "full", "last"], [9, 9, 0, 1])
    assert (plan.depth, dict(plan.lengths)) == (3, {"off": 0, "on": 3, "full": 0, "last": 1})
    # It travels to the workers.
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert controller.plan([], []) == SpeculationPlan()
    with pytest.raises(ValueError, match="room has 1 entries for 2 requests"):
        controller.plan(["a", "b"], [1])


def test_the_figures_of_an_answer() -> None:
    controller = Controller("paper", capacity=2, max_length=8)
    controller.admit("a", max_length=6)
    observe(controller, {"a": (1, [0.1, 0.3])}, overlap=0.8)
    observe(controller, {"a": (0, [])})
    observe(controller, {"a": (2, [0.5, 0.25, 0.45, 0.4])}, overlap=0.4)
    figures = controller.finish("a")
    assert figures is not None
    assert (figures.policy, figures.steps, figures.steps_off) == ("paper", 3, 1)
    assert (figures.length_mean, figures.length_max, figures.length_limit) == (2.0, 4, 6)
    # (.1 + .3 + .5 + .25 + .45 + .4) / 6 = 2 / 6; last (.5 + .25 + .45 + .4) / 4 = .4.
    assert figures.kld_mean == pytest.approx(1 / 3, abs=1e-6)
    assert figures.kld_last == pytest.approx(0.4, abs=1e-6)
    assert figures.kld_max == pytest.approx(0.5, abs=1e-6)
    # At most ten KLDs: both windows are one and WVIR is 1. SF = e^.4 - 1 = .49 is stable, e^.8 - 1 = 1.23 is not.
    assert figures.wvir_mean == pytest.approx(1.0, abs=1e-4)
    assert figures.wvir_last == pytest.approx(1.0, abs=1e-4)
    assert figures.stability == 0.5
    # (2 * .8 + 4 * .4) / 6 = 3.2 / 6.
    assert figures.expected_acceptance_rate == pytest.approx(3.2 / 6, abs=1e-6)
    assert figures.capped_steps == 0
    assert (figures.straggler_wait_ms, figures.straggler_caused_ms, figures.straggler_steps) == (0.0, 0.0, 0)


def test_nothing_measured_is_none() -> None:
    controller = Controller("autoregressive", capacity=1, max_length=8)
    controller.admit("a")
    observe(controller, {"a": (0, [])})
    figures = controller.finish("a")
    assert figures is not None
    assert (figures.steps, figures.steps_off, figures.length_mean, figures.length_max) == (1, 1, 0.0, 0)
    assert (figures.kld_mean, figures.kld_last, figures.kld_max) == (None, None, None)
    assert (figures.wvir_mean, figures.wvir_last, figures.stability) == (None, None, None)
    assert figures.expected_acceptance_rate is None


def test_before_the_first_step_every_count_is_zero() -> None:
    controller = Controller("paper", capacity=1, max_length=8)
    controller.admit("a")
    figures = controller.snapshot("a")
    assert figures is not None
    assert (figures.steps, figures.length_mean, figures.kld_mean, figures.length_limit) == (0, 0.0, None, 8)


def test_a_nan_step_is_ignored_counted_and_alone() -> None:
    controller = Controller("paper", capacity=2, max_length=8)
    controller.plan(["a", "b"], [9, 9])
    observe(controller, {"a": (1, [0.25, 0.75]), "b": (1, [0.5])})
    observe(controller, {"a": (2, [0.1, NAN, 9.0]), "b": (0, [1.5])})
    assert controller.ignored_steps == 1
    a, b = controller.finish("a"), controller.finish("b")
    assert a is not None
    assert b is not None
    assert (a.kld_mean, a.kld_last, a.kld_max, a.expected_acceptance_rate) == (0.5, 0.5, 0.75, 0.5)
    assert (a.steps, a.length_mean) == (2, 2.5)
    assert (b.kld_mean, b.kld_last, b.kld_max) == (1.0, 1.5, 1.5)


def test_drafts_without_a_distribution_leave_the_signals_empty() -> None:
    controller = Controller("static", capacity=1, max_length=8)
    controller.plan(["a"], [9])
    for _ in range(3):
        observe(controller, {"a": (1, [NAN, NAN])})
    figures = controller.finish("a")
    assert figures is not None
    assert (figures.steps, figures.length_mean, figures.kld_mean, figures.stability) == (3, 2.0, None, None)
    assert controller.ignored_steps == 3


def test_an_observation_that_does_not_add_up_is_refused() -> None:
    controller = Controller("paper", capacity=1, max_length=8)
    controller.plan(["a"], [9])
    one = np.array([1])
    short = StepObservation(("a",), 2 * one, one, *(np.zeros(size, dtype=np.float32) for size in (1, 2, 1)))
    with pytest.raises(ValueError, match="kld has 1 and overlap 2 entries: num_draft_tokens sums to 2"):
        controller.observe(short)


def straggling(planned: dict[str, int]) -> dict[str, tuple[float, float, int]]:
    controller = Controller("static", capacity=4, max_length=8)
    for request in planned:
        controller.admit(request)
        observe(controller, {request: (0, [])})
    plan = SpeculationPlan(max(planned.values()), planned)
    observe(controller, {request: (0, []) for request in planned}, plan=plan, draft_step_ms=2.5)
    figures = {request: controller.finish(request) for request in planned}
    return {r: (f.straggler_wait_ms, f.straggler_caused_ms, f.straggler_steps) for r, f in figures.items() if f}


def test_the_longest_alone_makes_the_others_wait() -> None:
    # D = 7, D' = 4, d = 2.5: waits (7 - 4) 2.5, 0, (7 - 1) 2.5, (7 - 0) 2.5; b causes (7 - 4) 2.5 * 3.
    assert straggling({"a": 4, "b": 7, "c": 1, "d": 0}) == {
        "a": (7.5, 0.0, 0),
        "b": (0.0, 22.5, 1),
        "c": (15.0, 0.0, 0),
        "d": (17.5, 0.0, 0),
    }


def test_two_longest_share_no_blame_and_one_request_waits_for_nobody() -> None:
    assert straggling({"a": 4, "b": 4, "c": 2}) == {"a": (0.0, 0.0, 0), "b": (0.0, 0.0, 0), "c": (5.0, 0.0, 0)}
    assert straggling({"a": 4}) == {"a": (0.0, 0.0, 0)}


def test_stragglers_that_have_left_are_passed_over() -> None:
    controller = Controller("static", capacity=4, max_length=8)
    controller.plan(["a", "b", "c"], [9, 9, 9])
    controller.finish("b")
    observe(controller, {"a": (0, [])}, plan=SpeculationPlan(6, {"a": 2, "b": 6, "c": 2}), draft_step_ms=1.0)
    a = controller.finish("a")
    assert a is not None
    assert (a.straggler_wait_ms, a.straggler_caused_ms, a.straggler_steps) == (4.0, 0.0, 0)


def test_without_a_time_nothing_is_booked() -> None:
    controller = Controller("static", capacity=2, max_length=8)
    plan = controller.plan(["a", "b"], [4, 1])
    observe(controller, {"a": (0, []), "b": (0, [])}, plan=plan)
    b = controller.finish("b")
    assert b is not None
    assert b.straggler_wait_ms == 0.0


def test_preemption_restarts_the_calibration_and_keeps_the_figures() -> None:
    controller = Controller("paper", {"warmup_tokens": 4, "warmup_length": 4}, capacity=1, max_length=8)
    lengths(controller, ["a"])
    observe(controller, {"a": (2, [0.0] * 4)}, overlap=0.25)
    assert lengths(controller, ["a"]) == [2]
    controller.preempt("a")
    assert controller.live == 1
    # The slot is free for another while a waits; a's late observation changes nothing.
    assert lengths(controller, ["b"]) == [4]
    observe(controller, {"a": (4, [9.0] * 4)})
    controller.finish("b")
    snapshot = controller.snapshot("a")
    assert snapshot is not None
    assert (snapshot.steps, snapshot.kld_max) == (1, 0.0)
    assert lengths(controller, ["a"]) == [4]
    observe(controller, {"a": (3, [0.5, 0.5])}, overlap=1.0)
    figures = controller.finish("a")
    assert figures is not None
    assert (figures.steps, figures.length_mean, figures.length_max) == (2, 3.0, 4)
    # (4 * .25 + 2 * 1) / 6.
    assert figures.expected_acceptance_rate == pytest.approx(0.5)
    controller.preempt("unknown")
    assert controller.live == 0


def test_an_aborted_request_is_forgotten_and_a_late_observation_is_dropped() -> None:
    controller = Controller("paper", capacity=2, max_length=8)
    controller.plan(["a", "b"], [9, 9])
    assert controller.finish("a") is not None
    assert controller.finish("a") is None
    assert controller.snapshot("a") is None
    observe(controller, {"a": (1, [5.0, NAN]), "b": (1, [0.5, 0.25])})
    b = controller.finish("b")
    assert b is not None
    assert (b.kld_max, b.length_mean) == (0.5, 2.0)
    assert (controller.live, controller.ignored_steps) == (0, 0)


def test_a_reused_slot_starts_from_nothing() -> None:
    controller = Controller("paper", {"warmup_tokens": 2}, capacity=1, max_length=8)
    controller.admit("old", max_length=3)
    lengths(controller, ["old"])
    observe(controller, {"old": (3, [2.0, 2.0, 2.0])}, temperature={"old": 1.0})
    controller.finish("old")
    assert lengths(controller, ["new"]) == [5]
    figures = controller.finish("new")
    assert figures is not None
    assert (figures.steps, figures.kld_mean, figures.length_limit, figures.length_max) == (0, None, 8, 0)


def test_more_requests_than_slots_is_an_error() -> None:
    controller = Controller("paper", capacity=2, max_length=8)
    with pytest.raises(RuntimeError, match="all 2 history slots"):
        controller.plan(["a", "b", "c"], [9, 9, 9])


def test_waiting_requests_take_no_slot() -> None:
    controller = Controller("paper", capacity=1, max_length=8)
    for request in "abcdef":
        controller.admit(request)
    assert lengths(controller, ["f"]) == [5]
    assert controller.live == 6


def test_the_default_switches_at_run_time_and_keeps_histories() -> None:
    controller = Controller("static", {"length": 6}, capacity=3, max_length=8)
    controller.admit("own", policy="static", settings={"length": 1})
    ids = ["own", "a"]
    assert lengths(controller, ids) == [1, 6]
    # 30 tokens end the calibration; under static it is kept all the same: SL_max = 4 (1 + 0) = 4.
    for _ in range(5):
        observe(controller, {"own": (1, [0.0]), "a": (4, [0.0] * 6)})
    controller.set_policy("paper")
    assert lengths(controller, ids) == [1, 4]
    controller.set_policy("autoregressive")
    assert lengths(controller, ids) == [1, 0]
    with pytest.raises(ValueError, match=r"speculation\.policy 'foo'"):
        controller.set_policy("foo")
    assert lengths(controller, ids) == [1, 0]
    a, own = controller.finish("a"), controller.finish("own")
    assert a is not None
    assert own is not None
    assert (a.policy, a.steps, a.kld_mean, own.policy) == ("autoregressive", 5, 0.0, "static")


def test_a_switch_applies_the_new_calibration_length() -> None:
    controller = Controller("paper", {"warmup_tokens": 30}, capacity=1, max_length=8)
    lengths(controller, ["a"])
    observe(controller, {"a": (3, [0.0] * 5)})
    assert lengths(controller, ["a"]) == [5]
    controller.set_policy("paper", {"warmup_tokens": 5})
    assert lengths(controller, ["a"]) == [3]


def test_policies_mix_in_one_batch_and_each_has_its_own_cap() -> None:
    controller = Controller("paper", {"warmup_tokens": 1, "warmup_length": 8}, capacity=6, max_length=8)
    shared = {"warmup_tokens": 1, "warmup_length": 8}
    controller.admit("r1", policy="reference", settings=shared)
    controller.admit("r2", policy="reference", settings=shared)
    controller.admit("k3", policy="static", settings={"length": 3})
    controller.admit("p3", policy="paper", settings=shared)
    ids = ["p1", "r1", "k3", "p2", "r2", "p3"]
    lengths(controller, ids)
    accepted = {"p1": 2, "r1": 5, "k3": 8, "p2": 5, "r2": 8, "p3": 8}
    observe(controller, {request: (accepted[request], [0.0] * 8) for request in ids})
    # p3 chose what the default is, so it shares its cap: mean (2 + 5 + 8) / 3 = 5. Reference: ceil(6.5) = 7.
    assert lengths(controller, ids) == [2, 5, 3, 5, 7, 5]
    controller.set_policy("static", {"length": 1})
    # p3 alone in its group is its own mean.
    assert lengths(controller, ids) == [1, 5, 3, 1, 7, 8]


def test_mixed_policies_measure_stability_by_their_own_preset() -> None:
    controller = Controller("paper", capacity=2, max_length=8)
    controller.admit("r", policy="reference")
    controller.plan(["p", "r"], [9, 9])
    # Flat KLDs of .1: WVIR is 0 by the paper and 20 by the reference; SF = e^.2 - 1 = .2214, times 20 is above 1.
    observe(controller, {"p": (1, [0.1] * 6), "r": (1, [0.1] * 6)})
    p, r = controller.finish("p"), controller.finish("r")
    assert p is not None
    assert r is not None
    assert (p.stability, r.stability, r.wvir_last) == (1.0, 0.0, 20.0)
    assert p.wvir_last == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"policy": "foo"},
            r"'foo' is unknown: choose adaedl, autoregressive, batch_schedule, goodput, paper, reference or static",
        ),
        ({"policy": "static", "settings": {"length": 9}}, r"length 9 .* from 0 to 8"),
        ({"settings": {"length": 1}}, r"settings \{'length': 1\} come without a policy"),
        ({"max_length": -1}, r"dsde_max_length -1 .* an integer from 0 to 8"),
        ({"max_length": 2.5}, r"dsde_max_length 2\.5 .* an integer from 0 to 8"),
        ({"max_length": True}, r"dsde_max_length True"),
    ],
)
def test_a_bad_choice_is_refused_and_keeps_nothing(choice: dict[str, object], message: str) -> None:
    controller = Controller("paper", capacity=1, max_length=8)
    with pytest.raises(ValueError, match=message):
        controller.admit("a", **choice)  # type: ignore[arg-type]
    assert controller.live == 0


def test_an_id_cannot_be_admitted_twice() -> None:
    controller = Controller("paper", capacity=1, max_length=8)
    controller.admit("a")
    with pytest.raises(ValueError, match="'a' is already live"):
        controller.admit("a")


def test_a_longer_wish_than_the_limit_is_the_limit() -> None:
    controller = Controller("static", {"length": 8}, capacity=2, max_length=8)
    controller.admit("a", max_length=64)
    controller.admit("b", max_length=2)
    assert lengths(controller, ["a", "b"]) == [8, 2]


def test_ten_thousand_requests_leave_nothing_behind() -> None:
    controller = Controller("paper", capacity=20, max_length=8)
    addresses = [controller._history._kld.ctypes.data, controller._history._calibration.ctypes.data]
    for batch in range(500):
        ids = [f"{batch}-{index}" for index in range(20)]
        for request in ids[:5]:
            controller.admit(request, policy="static", settings={"length": batch % 8})
        controller.plan(ids, [9] * 20)
        controller.preempt(ids[7])
        observe(controller, {request: (1, [0.5, 0.25]) for request in ids})
        for request in ids:
            assert controller.finish(request) is not None
    assert (controller.live, controller._history.used, controller._choosers) == (0, 0, 0)
    assert len(controller._policies) <= 1
    assert addresses == [controller._history._kld.ctypes.data, controller._history._calibration.ctypes.data]


def test_the_record_becomes_the_object_of_the_answer() -> None:
    controller = Controller("paper", capacity=1, max_length=8)
    controller.plan(["a"], [9])
    observe(controller, {"a": (1, [0.5, 0.5])})
    figures = controller.finish("a")
    assert figures is not None
    answer = figures.to_dict()
    assert answer["speculation_length"] == {"mean": 2.0, "max": 2, "limit": 8}
    assert answer["kld"] == {"mean": 0.5, "last": 0.5, "max": 0.5}
    assert answer["straggler"] == {"wait_ms": 0.0, "caused_ms": 0.0, "steps": 0}


def test_figures_are_those_of_the_step_just_seen_whenever_they_are_asked_for() -> None:
    # One controller is asked after every step, the other at the end: bookings in between change nothing.
    asked, left = (Controller("paper", capacity=3, max_length=8) for _ in range(2))
    rng = random.Random(3)
    for controller in (asked, left):
        controller.plan(["a", "b", "c"], [9] * 3)
    for _ in range(21):
        steps = {}
        for request in "abc":
            klds = [NAN if rng.random() < 0.05 else rng.random() for _ in range(rng.randint(0, 4))]
            steps[request] = (rng.randint(0, len(klds)), klds)
        for controller in (asked, left):
            observe(controller, steps)
        assert all(asked.snapshot(request) for request in "abc")
    for request in "abc":
        one, other = asked.finish(request), left.finish(request)
        assert one is not None
        assert other is not None
        assert one == other
