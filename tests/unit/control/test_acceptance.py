"""Acceptance models: calibrated and sharp on drafts whose chances are known, and what they are taught."""

import math

import numpy as np
import pytest

from dsde.control.acceptance import Acceptance, Verification
from dsde.control.prediction import Logistic, sigmoid

SAMPLED, GREEDY = 1.0, 0.0


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that an accepted slot scores above a rejected one (Mann-Whitney)."""
    ranks = scores.argsort().argsort() + 1.0
    positive = labels == 1
    p, n = int(positive.sum()), int((~positive).sum())
    return (float(ranks[positive].sum()) - p * (p + 1) / 2) / (p * n)


def calibration_error(scores: np.ndarray, labels: np.ndarray, bins: int = 10) -> float:
    order = scores.argsort()
    parts = zip(np.array_split(scores[order], bins), np.array_split(labels[order], bins), strict=True)
    return sum(abs(float(s.mean() - y.mean())) * s.size for s, y in parts) / scores.size


def test_logistic_first_step_by_hand() -> None:
    # One row x = 1, y = 1 at p = 1/2: A = 4 * .998 + 1/4 = 4.242, w = (1/2) / (4.242 + .5) = .105441.
    model = Logistic(np.zeros((1, 1)), 0)
    one = np.ones((1, 1))
    model.learn(one, one[0], one[0])
    assert model.weights.item() == pytest.approx(0.105441, abs=1e-6)


def test_logistic_finds_the_weights_of_its_data() -> None:
    rng = np.random.default_rng(0)
    truth = np.array([-0.5, 1.5, 0.8])
    model = Logistic(np.zeros((2, 3)), 1)
    for _ in range(400):
        x = np.concatenate((np.ones((16, 1)), rng.standard_normal((16, 2))), axis=1)
        y = (rng.random(16) < sigmoid(x @ truth)).astype(np.float64)
        model.learn(x, y, np.ones(16))
    assert model.weights.tolist() == pytest.approx(truth.tolist(), abs=0.2)


def run(temperature: float, steps: int, noise: float = 0.5) -> tuple[np.ndarray, np.ndarray, Acceptance]:
    """Predictions and fates of the verified slots of the last half; z ~ N(.5, 2), the drafter sees z + noise."""
    rng = np.random.default_rng(1)
    requests, depth = 8, 4
    model = Acceptance(requests, depth)
    slots = np.arange(requests)
    scores, labels = [], []
    for step in range(steps):
        z = 0.5 + 2.0 * rng.standard_normal((requests, depth))
        chance = sigmoid(z.copy())
        top = sigmoid(z + noise * rng.standard_normal((requests, depth)))
        entropy = -top * np.log(top) - (1 - top) * np.log(1 - top) + (1 - top) * 2
        model.tick()
        model.draft(slots, depth, top, entropy)
        survival, pending = model.drafts(slots)
        assert pending.tolist() == [depth] * requests
        fate = (rng.random(chance.shape) < chance).astype(np.int64)
        accepted = fate.cumprod(1).sum(1)
        reached = np.arange(depth) <= accepted[:, None]
        if step >= steps // 2:
            single = np.concatenate((survival[:, :1], survival[:, 1:] / survival[:, :-1]), axis=1)
            scores.append(single[reached])
            labels.append(fate[reached])
        drafted = np.full(requests, depth)
        model.learn(Verification(slots, drafted, accepted, chance), np.full(requests, temperature))
    return np.concatenate(scores), np.concatenate(labels), model


@pytest.mark.parametrize("temperature", [GREEDY, SAMPLED])
def test_predictions_are_sharp_and_calibrated(temperature: float) -> None:
    scores, labels, _ = run(temperature, 1200)
    assert auc(scores, labels) >= 0.84
    assert calibration_error(scores, labels) <= 0.02


def test_before_drafting_the_expectation_is_the_mean() -> None:
    _, labels, model = run(GREEDY, 800)
    survival, share = model.expect(np.arange(8))
    assert survival[:, 0].mean().item() == pytest.approx(labels.mean().item(), abs=0.04)
    # The drafter knows most of what there is to know: much of the variance will be resolved.
    assert 0.3 < share[0, 0].item() < 0.8


def test_choosing_what_is_verified_does_not_bias_the_average() -> None:
    # Slots have chance .9 or .1, told by the drafter; only the .9 are ever verified, yet alpha is near .5.
    rng = np.random.default_rng(2)
    model = Acceptance(1, 1)
    slot = np.zeros(1, dtype=np.int64)
    for step in range(1200):
        sure = rng.random() < 0.5
        chance = 0.9 if sure else 0.1
        model.tick()
        model.draft(slot, 1, np.array([[chance]]), np.array([[0.5]]))
        verify = sure or step < 100
        accepted = np.array([int(verify and rng.random() < chance)])
        model.learn(
            Verification(slot, np.array([int(verify)]), accepted, np.full((1, 1), chance)),
            np.zeros(1),
        )
    survival, _ = model.expect(slot)
    assert 0.4 < survival.item() < 0.6


def log_odds(p: float) -> float:
    return math.log(p / (1.0 - p))


def test_a_standing_by_hand() -> None:
    model = Acceptance(2, 4)
    slots = np.array([0])
    assert model.standing(slots).item() == 0.0
    model.tick()
    model.draft(slots, 3, None, None)
    # Greedy, 2 of 3 accepted: labels 1 1 0. All: (12 * .999 + 2) / (20 * .999 + 3) = .60875; own (2 + 3 a) / 6.
    overlap = np.full((1, 3), 0.9)
    model.learn(Verification(slots, np.array([3]), np.array([2]), overlap), np.zeros(1))
    everyone = (12 * 0.999 + 2) / (20 * 0.999 + 3)
    assert model.standing(slots).item() == pytest.approx(log_odds((2 + 3 * everyone) / 6) - log_odds(everyone))
    # Ten steps without drafts: the own sums fade by .97 each.
    for _ in range(10):
        model.tick()
    fade = 0.97**10
    own = (2 * fade + 3 * everyone) / (3 * fade + 3)
    assert model.standing(slots).item() == pytest.approx(log_odds(own) - log_odds(everyone))


def test_hope_fades_with_evidence_and_comes_back_with_time() -> None:
    model = Acceptance(1, 4)
    slot = np.array([0])
    # One standard error of .6 over the 20 slots taken for granted.
    first = 1.0 / (1.0 + math.exp(-0.4))
    assert model.hopeful(slot)[0, 0] == pytest.approx(first + math.sqrt(first * (1 - first) / 20))
    hope = []
    for _ in range(200):
        model.tick()
        model.draft(slot, 1, None, None)
        model.learn(Verification(slot, np.array([1]), np.array([0]), np.zeros((1, 1))), np.zeros(1))
        hope.append(float((model.hopeful(slot) - model.expect(slot)[0])[0, 0]))
    assert hope[-1] < hope[20] < hope[0]
    for _ in range(2000):
        model.tick()
    assert float((model.hopeful(slot) - model.expect(slot)[0])[0, 0]) > 2 * hope[-1]


def test_a_new_request_is_expected_to_do_as_the_latest_did() -> None:
    model = Acceptance(2, 1)
    slot = np.array([0])
    for _ in range(100):
        model.tick()
        model.draft(slot, 1, None, None)
        model.learn(Verification(slot, np.array([1]), np.array([0]), np.full((1, 1), 0.1)), np.ones(1))
    model.start(1)
    assert model.expect(np.array([1]))[0][0, 0] < 0.5


def test_labels_end_at_the_first_rejection_and_are_overlaps_when_sampled() -> None:
    model = Acceptance(1, 4)
    slot = np.array([0])
    model.tick()
    model.draft(slot, 4, None, None)
    overlap = np.array([[0.8, 0.3, 0.9, 0.9]])
    model.learn(Verification(slot, np.array([4]), np.array([1]), overlap), np.ones(1))
    everyone = (12 * 0.999 + 1.1) / (20 * 0.999 + 2)
    assert model.standing(slot).item() == pytest.approx(log_odds((1.1 + 3 * everyone) / 5) - log_odds(everyone))


def test_values_that_are_not_finite_leave_no_trace() -> None:
    model = Acceptance(2, 2)
    slots = np.array([0, 1])
    model.tick()
    model.draft(slots, 2, np.array([[math.nan, 0.5], [0.9, 0.9]]), np.array([[0.1, 0.1], [0.1, math.inf]]))
    survival, _ = model.drafts(slots)
    assert np.isfinite(survival).all()
    overlap = np.full((2, 2), math.nan)
    model.learn(Verification(slots, np.array([2, 2]), np.array([1, 2]), overlap), np.ones(2))
    model.tick()
    assert np.isfinite(model.standing(slots)).all()
    assert np.isfinite(model.expect(slots)[0]).all()
