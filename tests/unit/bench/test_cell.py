from __future__ import annotations

import pytest

from dsde.bench.cell import Cell, Counts, Run, Scene, geometric_mean, results

CELL = Cell(Scene((8,), 0.0, "mix"), "high")


def run(tokens_per_s: float, counts: Counts | None = None) -> Run:
    return Run(tokens=tokens_per_s * 2.0, seconds=2.0, latency_s=100.0 / tokens_per_s, counts=counts or Counts())


def test_a_geometric_mean_by_hand() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([]) is None


def test_ratios_are_taken_round_by_round() -> None:
    # The machine halves its speed in round 2; every ratio stays what it was.
    runs = {
        "autoregressive": [run(10.0), run(5.0)],
        "static-1": [run(12.0), run(6.0)],
        "static-2": [run(11.0), run(5.5)],
        "paper": [run(9.0), run(4.5)],
    }
    found, best = results(CELL, runs, "autoregressive", ["static-1", "static-2"])
    by_policy = {one.policy: one for one in found}
    assert best == "static-1"
    assert by_policy["static-1"].ratio_to_autoregressive == pytest.approx(1.2)
    assert by_policy["static-1"].ratio_to_static_opt == pytest.approx(1.0)
    assert by_policy["paper"].ratio_to_autoregressive == pytest.approx(0.9)
    assert by_policy["paper"].ratio_to_static_opt == pytest.approx(0.75)
    assert by_policy["paper"].tokens_per_s == pytest.approx((9.0 * 4.5) ** 0.5)
    assert [one.rounds for one in found] == [2, 2, 2, 2]


def test_a_contender_that_sat_out_is_compared_over_the_rounds_it_ran() -> None:
    # static-2 ran in the fast round only: 11 / 10 beats 10.5 / 10 and 5.25 / 5, whatever the speeds look like.
    runs = {
        "autoregressive": [run(10.0), run(5.0)],
        "static-1": [run(10.5), run(5.25)],
        "static-2": [run(11.0), None],
        "goodput": [None, run(5.5)],
        "never": [None, None],
    }
    found, best = results(CELL, runs, "autoregressive", ["static-1", "static-2"])
    by_policy = {one.policy: one for one in found}
    assert best == "static-2"
    assert "never" not in by_policy
    assert by_policy["static-2"].rounds == 1
    # It shared no round with static-opt, so there is no ratio to give.
    assert by_policy["goodput"].ratio_to_static_opt is None
    assert by_policy["goodput"].ratio_to_autoregressive == pytest.approx(1.1)


def test_what_became_of_the_drafts() -> None:
    # Two rounds of 10 verifications, 40 drafts verified, 50 computed; 30 and 10 accepted.
    counts = [Counts(5, 10, 40, 30, 50, 20), Counts(5, 10, 40, 10, 50, 20)]
    runs = {"autoregressive": [run(1.0)] * 2, "static-4": [run(1.0, one) for one in counts]}
    found, _ = results(CELL, runs, "autoregressive", ["static-4"])
    plain, fixed = found
    assert fixed.mean_acceptance_length == pytest.approx(1 + 40 / 20)
    assert fixed.acceptance_rate == pytest.approx(40 / 80)
    assert fixed.wasted_draft_share == pytest.approx(1 - 40 / 100)
    assert fixed.draft_steps == 40
    assert (plain.mean_acceptance_length, plain.acceptance_rate, plain.wasted_draft_share) == (1.0, None, None)


def test_an_entry_of_the_json_file() -> None:
    found, _ = results(
        Cell(Scene((1, 4, 1), 1.0, "code"), "low"), {"autoregressive": [run(10.0)]}, "autoregressive", []
    )
    assert found[0].to_dict() == {
        "batch": "1-4-1",
        "temperature": 1.0,
        "draft": "low",
        "workload": "code",
        "policy": "autoregressive",
        "tokens_per_s": pytest.approx(10.0),
        "mean_latency_s": pytest.approx(10.0),
        "ratio_to_autoregressive": pytest.approx(1.0),
        "ratio_to_static_opt": None,
        "mean_acceptance_length": 1.0,
        "acceptance_rate": None,
        "wasted_draft_share": None,
        "draft_steps": 0,
        "rounds": 1,
    }
