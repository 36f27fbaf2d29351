"""The goodput policy through the controller: prefixes blind to drawn tokens, rest, probes, bounded loss."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from dsde.control.controller import Controller
from dsde.control.records import SpeculationPlan, StepObservation
from dsde.control.replay import COSTS, StepCosts, replay
from dsde.control.trace import synthesize

BASE, TOKEN, DRAFT = 112.0, 6.8, 15.0


class Engine:
    """A batch in lock-step: what is accepted is decided by `accept(request, slot)`."""

    def __init__(self, controller: Controller, ids: Sequence[str], temperature: float = 0.0) -> None:
        self.controller, self.ids, self.temperature = controller, list(ids), temperature
        self.kept = dict.fromkeys(self.ids, 0)
        self.time = self.tokens = self.drafting = 0.0
        self.prompt_tokens = 0
        self.slowness = 1.0

    def step(self, top: float, accept: float, rng: random.Random) -> tuple[SpeculationPlan, SpeculationPlan]:
        n = len(self.ids)
        plan = self.controller.plan(self.ids, [99] * n)
        drafted = [self.kept[i] for i in self.ids]
        accepted = []
        for count in drafted:
            good = 0
            while good < count and rng.random() < accept:
                good += 1
            accepted.append(good)
        tokens = n + sum(drafted)
        verify = BASE + TOKEN * tokens
        noise = np.array([[rng.uniform(-0.05, 0.05) for _ in range(plan.depth)] for _ in range(n)], dtype=np.float32)
        depth = self.depth(plan, top + noise, 1.0 - top + np.abs(noise))
        noise = noise[:, :depth]
        some = depth > 0
        self.controller.observe(
            StepObservation(
                request_ids=tuple(self.ids),
                num_draft_tokens=np.array(drafted),
                num_accepted_tokens=np.array(accepted),
                kld=np.full(sum(drafted), 0.2, dtype=np.float32),
                overlap=np.full(sum(drafted), accept, dtype=np.float32),
                temperature=np.full(n, self.temperature, dtype=np.float32),
                draft_step_ms=DRAFT * self.slowness if some else None,
                draft_ids=tuple(self.ids) if some else (),
                draft_top_prob=top + noise if some else None,
                draft_entropy=1.0 - top + np.abs(noise) if some else None,
                step_ms=(verify + TOKEN * self.prompt_tokens) * self.slowness,
                num_tokens=tokens + self.prompt_tokens,
                has_prefill=self.prompt_tokens > 0,
            ),
            plan,
        )
        final = self.controller.trim(plan, dict.fromkeys(self.ids, 99))
        self.kept = {request: min(depth, length) for request, length in final.lengths.items()}
        self.time += verify + DRAFT * depth
        self.drafting += DRAFT * depth
        self.tokens += n + sum(accepted)
        return plan, final

    def depth(self, plan: SpeculationPlan, top: np.ndarray, entropy: np.ndarray) -> int:
        """Draft steps until nobody wants another one."""
        if plan.stop is None or not plan.depth:
            return plan.depth
        rule = plan.stop.bind(self.ids)
        steps = range(plan.depth)
        return next((j + 1 for j in steps if not rule.goes_on(j, top[:, j], entropy[:, j]).any()), plan.depth)


def controller(requests: int, trims: bool = True, policy: str = "goodput") -> Controller:
    return Controller(policy, capacity=requests, max_length=6, trims=trims)


def test_trim_keeps_a_prefix_that_confidence_chose() -> None:
    rng = random.Random(0)
    engine = Engine(controller(4), "abcd")
    for _ in range(40):
        plan, final = engine.step(0.9, 0.9, rng)
        assert final.depth == max(final.lengths.values())
        for request, length in final.lengths.items():
            assert 0 <= length <= plan.lengths[request] <= plan.depth
    assert final.depth > 0
    assert plan.confidence


@pytest.mark.parametrize("trial", range(10))
def test_what_is_verified_does_not_depend_on_confidence_behind_it(trial: int) -> None:
    # The token drawn at j shows in what the drafter says of later slots; slot j is kept or not whatever that is.
    rng = random.Random(trial)
    kept = []
    cut = rng.randint(1, 3)
    said = np.random.default_rng(trial).random((2, 4), dtype=np.float32)
    for other in (0.01, 0.5, 0.99):
        c = controller(2)
        engine = Engine(c, "ab")
        for _ in range(30):
            engine.step(0.9, 0.85, random.Random(7))
        plan = c.plan(["a", "b"], [99, 99])
        top = said.copy()
        top[:, cut:] = other
        n = np.array([engine.kept["a"], engine.kept["b"]])
        total = int(n.sum())
        c.observe(
            StepObservation(
                ("a", "b"), n, n, np.zeros(total), np.ones(total), np.zeros(2), 15.0, ("a", "b"), top, 1 - top
            ),
            plan,
        )
        final = c.trim(plan, {"a": 99, "b": 99})
        kept.append([min(cut, length) for length in final.lengths.values()])
    assert kept[0] == kept[1] == kept[2]


def test_trim_cuts_to_the_room_and_leaves_out_who_has_ended() -> None:
    for policy in ("goodput", "static", "adaedl", "paper"):
        engine = Engine(controller(3, policy=policy), "abc")
        rng = random.Random(0)
        for _ in range(10):
            engine.step(0.95, 0.95, rng)
        c = engine.controller
        plan = c.plan(["a", "b", "c"], [99] * 3)
        c.finish("c")
        final = c.trim(plan, {"a": 1, "b": 0})
        assert final.lengths["b"] == 0
        assert final.lengths["a"] <= 1
        assert "c" not in final.lengths
        assert final.depth == max(final.lengths.values())


def test_other_policies_keep_their_plans() -> None:
    for policy in ("static", "paper", "reference"):
        engine = Engine(controller(2, policy=policy), "ab")
        plan, final = engine.step(0.2, 0.5, random.Random(0))
        assert final == plan
        assert not plan.confidence


def test_without_trim_the_plan_alone_verifies_what_pays() -> None:
    c = controller(2, trims=False)
    rng = random.Random(0)
    for request, accept in (("good", 0.95), ("bad", 0.05)):
        engine = Engine(c, [request])
        for _ in range(60):
            # Forced drafts: adaedl drafts whatever they cost, and feeds the models.
            c.set_policy("adaedl")
            engine.step(0.6, accept, rng)
    c.set_policy("goodput")
    plan = c.plan(["good", "bad"], [99, 99])
    assert plan.stop is None
    assert plan.lengths["good"] > plan.lengths["bad"]


def test_it_rests_when_speculation_does_not_pay_and_probes_cheaply() -> None:
    engine = Engine(controller(8), [str(i) for i in range(8)])
    rng = random.Random(0)
    for _ in range(100):
        engine.step(0.3, 0.1, rng)
    engine.time = engine.tokens = engine.drafting = 0.0
    probes = []
    for _ in range(1500):
        plan, _ = engine.step(0.3, 0.1, rng)
        if plan.depth:
            probes.append(plan)
    assert len(probes) >= 3
    assert all(sum(p.lengths.values()) == 1 == p.depth for p in probes)
    assert engine.drafting <= 0.005 * engine.time
    plain = (BASE + 8 * TOKEN) / 8
    assert engine.time / engine.tokens <= 1.005 * plain


def test_it_comes_back_when_acceptance_does() -> None:
    engine = Engine(controller(2), "ab")
    rng = random.Random(0)
    for _ in range(300):
        engine.step(0.3, 0.05, rng)
    assert engine.kept == {"a": 0, "b": 0}
    drafted = 0
    for _ in range(1500):
        plan, _ = engine.step(0.97, 0.97, rng)
        drafted += plan.depth > 1
    assert drafted > 200


def test_an_adversary_costs_at_most_one_percent() -> None:
    # The drafter claims certainty; tokens are accepted only while little speculation goes on.
    engine = Engine(controller(4), "abcd")
    rng = random.Random(0)
    recent = 0.0
    for _ in range(3000):
        plan, _ = engine.step(0.97, 0.95 if recent < 0.3 else 0.0, rng)
        recent = 0.9 * recent + 0.1 * (plan.depth > 0)
    assert engine.time / engine.tokens <= 1.01 * (BASE + 4 * TOKEN) / 4


def test_a_drafter_without_distributions_is_planned_by_averages() -> None:
    c = controller(1)
    kept = 0
    for _ in range(60):
        plan = c.plan(["a"], [99])
        c.observe(
            StepObservation(
                ("a",),
                np.array([kept]),
                np.array([kept]),
                np.full(kept, np.nan, dtype=np.float32),
                np.full(kept, np.nan, dtype=np.float32),
                np.zeros(1),
                2.0 if plan.depth else None,
                ("a",) if plan.depth else (),
                step_ms=BASE + TOKEN * (1 + kept),
                num_tokens=1 + kept,
            ),
            plan,
        )
        kept = c.trim(plan, {"a": 99}).lengths["a"]
    assert kept >= 3


def test_preempted_and_finished_requests_leave_nothing_behind() -> None:
    c = controller(2)
    rng = random.Random(0)
    engine = Engine(c, "ab")
    for _ in range(20):
        engine.step(0.9, 0.9, rng)
    c.preempt("a")
    engine.kept["a"] = 0
    engine.step(0.9, 0.9, rng)
    c.finish("a")
    c.finish("b")
    assert c.live == 0
    again = Engine(c, "cd")
    assert again.step(0.9, 0.9, rng)[0].lengths.keys() == {"c", "d"}


def test_a_mixed_batch_gives_each_request_its_own_rule() -> None:
    c = Controller("goodput", capacity=3, max_length=6, trims=True)
    c.admit("s", policy="static", settings={"length": 2})
    c.admit("e", policy="adaedl", settings={"length": 4, "threshold": 0.5})
    engine = Engine(c, ["g", "s", "e"])
    rng = random.Random(0)
    for _ in range(30):
        plan, final = engine.step(0.9, 0.8, rng)
        assert plan.lengths["s"] == final.lengths["s"] == 2
        assert plan.lengths["e"] == 4
        assert plan.stop is not None
        assert 1 <= final.lengths["e"] <= 4


def test_batch_one_with_good_drafts_gains_what_the_cost_model_promises() -> None:
    # Acceptance .9 whatever is said: the best K has rate (1 - .9^(K+1)) / .1 / (1 + ...): over K <= 6 at K = 6,
    # 5.217 tokens in 118.8 + 6 * (6.8 + 15) = 249.6 ms, 2.483 times the plain rate of 1 / 118.8.
    engine = Engine(controller(1), "a")
    rng = random.Random(0)
    for _ in range(100):
        engine.step(0.9, 0.9, rng)
    engine.time = engine.tokens = 0.0
    for _ in range(1500):
        engine.step(0.9, 0.9, rng)
    assert engine.tokens / engine.time * 118.8 == pytest.approx(2.483, rel=0.04)


def test_at_a_compute_bound_batch_of_bad_drafts_nothing_is_lost() -> None:
    trace = synthesize(requests=48, rounds=60, acceptance=0.3, seed=3)
    assert replay("goodput", trace, COSTS["cpu"], 32, steps=400).ratio >= 0.99


def test_noise_and_pauses_do_not_mislead_it() -> None:
    trace = synthesize(requests=32, rounds=60, acceptance=0.8, seed=3)
    noisy = StepCosts(112.0, 6.8, 13.43, 2.07, noise=0.05, pauses=0.01)
    clean = replay("goodput", trace, COSTS["cpu"], 4, steps=400).ratio
    assert replay("goodput", trace, noisy, 4, steps=400).ratio >= 0.97 * clean


def test_a_small_gain_is_checked_once_against_a_plain_step() -> None:
    # At acceptance .6 one draft token gains about 13 % for eight requests and 20 % for five.
    engine = Engine(controller(8), "abcdefgh")
    rng = random.Random(0)
    for _ in range(60):
        engine.step(0.6, 0.6, rng)
    for request in "fgh":
        engine.controller.finish(request)
        engine.ids.remove(request)
    # What five tokens take was never measured, until one step decodes plainly.
    depths = [engine.step(0.6, 0.6, rng)[0].depth for _ in range(100)]
    assert depths.count(0) == 1


def test_reading_the_prompts_of_others_is_no_loss_of_speculation() -> None:
    engine = Engine(controller(4), ["a", "b", "c", "d"])
    rng = random.Random(4)
    depths = []
    for step in range(120):
        engine.prompt_tokens = 700 if step % 3 == 0 else 0
        depths.append(engine.step(0.9, 0.9, rng)[0].depth)
    assert min(depths[60:]) > 0


def test_a_machine_that_slows_down_is_no_loss_of_speculation() -> None:
    rng = random.Random(7)
    engine = Engine(controller(2), ["a", "b"])
    for step in range(160):
        engine.slowness = 3.0 if step in range(80, 100) else 1.0
        plan, _ = engine.step(0.8, 0.8, rng)
        assert step < 80 or plan.depth > 0


def test_what_coming_back_cost_makes_probes_rare() -> None:
    """A probe that had to read a backlog for 400 ms waits for 0.3 % of the rest to pay that, not a draft step."""
    late: list[int] = []
    for catch_up_ms in (None, 400.0):
        c = controller(1)
        c.set_policy("goodput")
        c.plan(["a"], [99])
        probes = 0
        for step in range(4000):
            plan = c.plan(["a"], [99])
            drafted = plan.depth
            probes += drafted > 0 and step >= 1000
            c.observe(
                StepObservation(
                    request_ids=("a",),
                    num_draft_tokens=np.array([drafted]),
                    num_accepted_tokens=np.array([0]),
                    kld=np.full(drafted, 2.0, dtype=np.float32),
                    overlap=np.full(drafted, 0.05, dtype=np.float32),
                    temperature=np.array([0.0]),
                    draft_step_ms=5.0 if drafted and catch_up_ms is None else None,
                    catch_up_ms=catch_up_ms if drafted else None,
                    step_ms=20.0,
                    num_tokens=1 + drafted,
                ),
                plan,
            )
        late.append(probes)
    cheap, dear = late
    assert cheap >= 10
    assert dear == 0
