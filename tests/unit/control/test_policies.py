"""Settings, and the lengths that each policy proposes, worked by hand."""

from typing import Any

import numpy as np
import pytest

from dsde.control.history import WINDOW, Recent
from dsde.control.policies import build_policy, policy_names
from dsde.control.policies.paper import Paper, PaperSettings


def recent(
    accepted: list[float],
    *,
    klds: list[float] = (),  # type: ignore[assignment]
    last: float = 0.0,
    mean_pre: float = 0.0,
    max_pre: float = 0.0,
    temperature: float = 0.0,
    calibrating: list[bool] | None = None,
    full_steps: float = 0.0,
) -> Recent:
    """Histories of len(accepted) requests that differ in SL_A,max only."""
    size = len(accepted)
    window = np.zeros((size, WINDOW))
    if klds:
        window[:, -len(klds) :] = np.array(klds)

    def full(value: float) -> np.ndarray:
        return np.full(size, value, dtype=np.float64)

    return Recent(
        kld=window,
        count=np.full(size, len(klds)),
        kld_last=full(last),
        temperature=full(temperature),
        calibrating=np.array(calibrating or [False] * size),
        accepted_max=np.array(accepted, dtype=np.float64),
        full_steps=full(full_steps),
        kld_mean_pre=full(mean_pre),
        kld_max_pre=full(max_pre),
    )


def propose(name: str, history: Recent, limit: int = 16, **settings: Any) -> tuple[list[int], list[int]]:
    limits = np.full_like(history.count, limit)
    proposal = build_policy(name, settings, limit).propose(history, limits)
    return proposal.lengths.tolist(), proposal.caps.tolist()


FOUR = {"klds": [0.1, 0.3, 0.1, 0.3], "last": 0.2, "mean_pre": 0.2, "max_pre": 0.3}
# Newest .4 after five times .1.
SIX = {"klds": [0.1] * 5 + [0.4], "last": 0.15, "mean_pre": 0.15, "max_pre": 0.4}


def test_paper_prediction() -> None:
    # SL_max = 3 (1 + .2/.3) = 5. Four KLDs: both windows are one, WVIR = 1. SF = e^.4 - 1 = .491825.
    # SL_hat = (1 - .491825) (5 - 2) + 2 = 3.5245 -> 4.
    assert propose("paper", recent([3.0], **FOUR)) == ([4], [4])


def test_paper_windows_are_the_newest_10_and_30() -> None:
    # Twenty of 1, nine of 0, a newest 1. Sums of weights: S10 = (1 - .85^10) / .15 = 5.354171, S30 = 6.615797.
    # Short: the ones' share is a = 1 / S10 = .186770, variance a (1 - a) = .151887.
    # Long: b = (1 + S30 - S10) / S30 = .341852, variance b (1 - b) = .224989. WVIR = .675087.
    signals = build_policy("paper", {}, 8).signals(recent([3.0], klds=[1.0] * 20 + [0.0] * 9 + [1.0], last=0.25))
    assert signals.wvir.item() == pytest.approx(0.675087, abs=3e-6)
    assert signals.penalty.item() == pytest.approx(0.675087 * 0.648721, abs=3e-6)


def test_paper_falls_to_the_minimum_above_a_penalty_of_one() -> None:
    # SF = e^(2 * .35) - 1 = 1.0138, WVIR = 1: above 1. Just below, .34: .9739 leaves (1 - .9739) 3 + 2 = 2.08 -> 2.
    assert propose("paper", recent([3.0], **{**FOUR, "last": 0.35}))[0] == [2]
    # With a penalty above 1 the formula alone would give (1 - 6.389) * 3 + 2 < 0.
    assert propose("paper", recent([3.0], **{**FOUR, "last": 1.0}))[0] == [2]


def test_paper_zero_variance_has_no_penalty() -> None:
    # Var 0 / (0 + eps) = 0, so SL_hat = SL_max = 4 (1 + .2/.2) = 8, whatever SF is.
    assert propose("paper", recent([4.0], klds=[0.2] * 30, last=0.2, mean_pre=0.2, max_pre=0.2))[0] == [8]


def test_paper_one_sample_has_no_penalty() -> None:
    assert propose("paper", recent([3.0], klds=[2.0], last=2.0, mean_pre=2.0, max_pre=2.0))[0] == [6]


def test_paper_ignores_the_temperature() -> None:
    assert propose("paper", recent([3.0], **FOUR, temperature=0.1)) == ([4], [4])


def test_a_poor_calibration_gives_the_minimum_not_an_inverted_range() -> None:
    # SL_max = 0 (1 + ...) = 0 lies below SL_min = 2.
    assert propose("paper", recent([0.0], **FOUR))[0] == [2]
    assert propose("reference", recent([0.0], **FOUR))[0] == [2]


def test_paper_rounds_half_up() -> None:
    rule = Paper(PaperSettings(), 8)
    assert rule.round(np.array([2.4, 2.5, 3.5, 3.6])).tolist() == [2.0, 3.0, 4.0, 4.0]


def test_reference_prediction() -> None:
    # SL_max = round(5 (1 + .5 * .15/.4)) = round(5.9375) = 6, SL_min = max(ceil(.6), 2) = 2.
    # Short window 6 // 3 = 2: weights .9 1, variance .3^2 * .9 / 1.9^2 = .0224377.
    # Long: sum of weights (1 - .9^6) / .1 = 4.68559, newest's share a = .213420, variance .09 a (1 - a) = .0151084.
    # WVIR = 1.48512, SF = e^.3 - 1 = .349859, penalty .519583; SL_hat = .480417 * 4 + 2 = 3.92 -> ceil 4.
    history = recent([5.0], **SIX)
    signals = build_policy("reference", {}, 16).signals(history)
    assert signals.wvir.item() == pytest.approx(1.48512, abs=1e-4)
    assert signals.scale_factor.item() == pytest.approx(0.349859, abs=1e-6)
    assert propose("reference", history) == ([4], [4])


def test_reference_divides_by_the_temperature() -> None:
    # SF = e^(2 * .15/.5) - 1 = .822119, penalty 1.2209 > 1: SL_min.
    assert propose("reference", recent([5.0], **SIX, temperature=0.5))[0] == [2]
    # Hotter than 1 calms: SF = e^(.3/2) - 1 = .161834, penalty .24034; SL_hat = .75966 * 4 + 2 = 5.04 -> 6.
    assert propose("reference", recent([5.0], **SIX, temperature=2.0))[0] == [6]


def test_reference_minimum_is_a_tenth_of_the_maximum() -> None:
    # SL_max = 31, SL_min = ceil(3.1) = 4; penalty far above 1.
    assert propose("reference", recent([31.0], klds=SIX["klds"], last=2.0), limit=64)[0] == [4]  # type: ignore[arg-type]


def test_reference_maximum_stays_in_the_configured_range() -> None:
    # round(20 * 1.5) = 30 is clipped to 16 before SL_hat: penalty .519583 gives .480417 * 14 + 2 = 8.73 -> 9.
    assert propose("reference", recent([20.0], **{**SIX, "mean_pre": 0.4}))[0] == [9]


def test_reference_flat_history_is_taken_as_unstable() -> None:
    # Long variance 0 < 1e-6: WVIR 20. SF = e^.04 - 1 = .040811, penalty .81622; SL_hat = .18378 * 4 + 2 = 2.74 -> 3.
    flat = recent([4.0], klds=[0.02] * 30, last=0.02, mean_pre=0.02, max_pre=0.02)
    assert propose("reference", flat)[0] == [3]
    # Identical distributions: SF = 0, so even WVIR 20 costs nothing; SL_max = round(6 * 1) = 6.
    assert propose("reference", recent([6.0], klds=[0.0] * 30))[0] == [6]
    assert build_policy("reference", {}, 8).signals(recent([6.0], klds=[0.5])).wvir.item() == 0.0


def test_warmup_is_fixed_for_paper_and_doubles_for_reference() -> None:
    for full_steps, doubled in ((0.0, 2), (1.0, 4), (2.0, 8), (3.0, 16), (9.0, 16)):
        history = recent([0.0], calibrating=[True], full_steps=full_steps)
        assert propose("paper", history)[0] == [5]
        assert propose("reference", history)[0] == [doubled]
    assert propose("paper", history, warmup_length=7)[0] == [7]
    assert propose("paper", history, limit=3)[0] == [3]


def test_the_cap_is_the_mean_and_each_preset_rounds_it_its_way() -> None:
    # No penalty and mean/max = 0, so SL_hat = SL_A,max: mean (2 + 3 + 7) / 3 = 4.
    assert propose("paper", recent([2.0, 3.0, 7.0])) == ([2, 3, 7], [4, 4, 4])
    # Mean 7/3: the paper's rounds to 2 and cuts the third, the reference's ceils to 3 and does not.
    assert propose("paper", recent([2.0, 2.0, 3.0])) == ([2, 2, 3], [2, 2, 2])
    assert propose("reference", recent([2.0, 2.0, 3.0])) == ([2, 2, 3], [3, 3, 3])


def test_the_reference_cap_is_the_mean_of_whole_lengths() -> None:
    # SL_hat 3.92 and three of 2.48 -> 4 3 3 3, mean 3.25 -> 4. The mean of the reals, 2.84, would give 3.
    history = recent([5.0, 2.5, 2.5, 2.5], **SIX)
    assert propose("reference", history) == ([4, 3, 3, 3], [4, 4, 4, 4])


def test_a_calibrating_request_is_neither_in_the_mean_nor_cut() -> None:
    history = recent([2.0, 3.0, 9.0], calibrating=[False, False, True])
    # Mean of 2 and 3 = 2.5 -> 3; the third runs its warm-up length.
    assert propose("paper", history, warmup_length=9) == ([2, 3, 9], [3, 3, 9])


def test_a_limit_bounds_the_prediction_before_the_cap() -> None:
    # 2, 3 and 7 -> 2, 3, 4: mean 3.
    assert propose("paper", recent([2.0, 3.0, 7.0]), limit=4) == ([2, 3, 4], [3, 3, 3])
    assert propose("paper", recent([2.0, 3.0]), limit=0) == ([0, 0], [0, 0])


def test_static_and_autoregressive() -> None:
    history = recent([1.0, 9.0])
    assert propose("static", history, length=3) == ([3, 3], [3, 3])
    assert propose("static", history, length=0) == ([0, 0], [0, 0])
    assert propose("static", history) == ([4, 4], [4, 4])
    assert propose("static", history, limit=2) == ([2, 2], [2, 2])
    assert propose("autoregressive", history) == ([0, 0], [0, 0])


def test_names() -> None:
    names = ("adaedl", "autoregressive", "batch_schedule", "goodput", "paper", "reference", "static")
    assert policy_names() == names
    needed = {"batch_schedule": {"table": {1: 4}}}
    assert tuple(build_policy(name, needed.get(name, {}), 8).name for name in names) == names


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "foo",
            {},
            r"speculation\.policy 'foo' is unknown: choose adaedl, autoregressive, .*, reference or static",
        ),
        ("static", {"k": 3}, r"speculation\.settings\.k 3 is not a setting of policy 'static': choose length"),
        ("autoregressive", {"length": 0}, r"speculation\.settings\.length 0 .*'autoregressive': it takes none"),
        ("static", {"length": 9}, r"speculation\.settings\.length 9 .* an integer from 0 to 8"),
        ("static", {"length": -1}, r"length -1 .* from 0 to 8"),
        ("static", {"length": 2.5}, r"length 2\.5 .* an integer"),
        ("static", {"length": True}, r"length True .* an integer"),
        ("static", {"length": "4"}, r"length '4' .* an integer"),
        ("paper", {"decay": 0}, r"decay 0 .* a number above 0 and at most 1"),
        ("paper", {"decay": float("nan")}, r"decay nan .* a number above 0"),
        ("paper", {"long_window": 31}, r"long_window 31 .* from 2 to 30"),
        ("paper", {"short_window": 12, "long_window": 11}, r"short_window 12 .* from 2 to 11"),
        ("paper", {"warmup_length": 0}, r"warmup_length 0 .* from 1"),
        (
            "reference",
            {"short_window": 10},
            r"short_window 10 .*choose decay, min_length, warmup_length, warmup_tokens or cap",
        ),
        ("reference", {"warmup_tokens": 0}, r"warmup_tokens 0 .* from 1"),
    ],
)
def test_bad_choices_name_field_value_and_what_is_accepted(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_policy(name, settings, 8)
