from __future__ import annotations

import numpy as np
import pytest

from dsde.bench.cell import Cell, Scene
from dsde.bench.trail import SIGNALS, Trail, Trails, acceptance, slots, spearman
from dsde.control.records import SpeculationPlan, StepObservation


def step(
    drafted: dict[str, int], accepted: list[int], kld: list[float], top: dict[str, float] | None = None
) -> StepObservation:
    top = top or {}
    probability = np.array(list(top.values()))[:, None] if top else None
    return StepObservation(
        request_ids=tuple(drafted),
        num_draft_tokens=np.array(list(drafted.values())),
        num_accepted_tokens=np.array(accepted),
        kld=np.array(kld),
        overlap=np.ones(len(kld)),
        temperature=np.zeros(len(drafted)),
        draft_ids=tuple(top),
        draft_top_prob=probability,
        draft_entropy=None if probability is None else -np.log(probability),
    )


def test_a_signal_is_held_against_the_step_after_it() -> None:
    trail = Trail()
    trail.add(step({"a": 2, "b": 1}, [2, 0], [0.1, 0.3, 5.0], {"a": 0.9, "b": 0.5}), None)
    # The batch's order changes, and b was not drafted in between.
    trail.add(step({"b": 0, "a": 2}, [0, 1], [1.0, 3.0], {"b": 0.4, "a": 0.8}), None)
    trail.add(step({"a": 4, "b": 1}, [4, 1], [0.0] * 4 + [2.0]), None)
    pairs = acceptance([trail])
    # a: 0.9 then 1 of 2, 0.8 then 4 of 4; b: 0.4 then 1 of 1 (0.5 was before a step without drafts).
    assert list(zip(*(side.tolist() for side in pairs["confidence"]), strict=True)) == [
        (pytest.approx(0.9), 0.5),
        (pytest.approx(0.8), 1.0),
        (pytest.approx(0.4), 1.0),
    ]
    assert pairs["kld"][0].tolist() == pytest.approx([0.2, 2.0])
    assert pairs["kld"][1].tolist() == [0.5, 1.0]
    # a: 2 of 2 tried; then 1 of 2 more, the older at .95.
    assert pairs["average"][0].tolist() == pytest.approx([1.0, 2.9 / 3.9])
    # Fewer than 30 KLDs give no WVIR.
    assert len(pairs["wvir"][0]) == 0


def test_slots_count_up_to_the_first_rejection() -> None:
    trail = Trail()
    trail.add(step({"a": 2}, [2], [0.1, 0.3], {"a": 0.9}), None)
    trail.add(step({"a": 3}, [1], [1.0, 3.0, 9.0]), None)
    values, positions, labels = slots([trail])
    known = dict(zip(SIGNALS, values.T.tolist(), strict=True))
    # Both slots of the first step were tried before anything was known.
    assert known["kld"] == pytest.approx([np.nan, np.nan, 0.2, 0.2], nan_ok=True)
    # The drafter spoke of one slot only.
    assert known["confidence"] == pytest.approx([np.nan, np.nan, 0.9, np.nan], nan_ok=True)
    assert positions.tolist() == [1, 2, 1, 2]
    assert labels.tolist() == [1, 1, 1, 0]


def test_wvir_needs_its_long_window_and_is_the_papers() -> None:
    from dsde.control.signals import weighted_variance

    klds = [float(n % 7) for n in range(40)]
    trail = Trail()
    for start in range(0, 40, 8):
        trail.add(step({"a": 8}, [4], klds[start : start + 8]), None)
    values, shares = acceptance([trail])["wvir"]
    # After 32 KLDs for the first time, and only that once before a last step.
    assert shares.tolist() == [0.5]
    newest = np.array([klds[2:32]])
    short = weighted_variance(newest[:, -10:], np.array([10]), 0.85)
    long = weighted_variance(newest, np.array([30]), 0.85)
    assert values.tolist() == pytest.approx([float((short / long)[0])])


def test_spearman_by_hand() -> None:
    # Ranks 1 2 3 4 and 1 3 2 4: 1 - 6 * 2 / (4 * 15) = 0.8.
    assert spearman(np.array([1.0, 2.0, 3.0, 9.0]), np.array([0.1, 0.3, 0.2, 0.9])) == pytest.approx(0.8)
    # Ties share their mean rank: 1.5 1.5 3 against 1 2 3 gives sqrt(3) / 2.
    assert spearman(np.array([5.0, 5.0, 7.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(0.75**0.5)
    assert spearman(np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0])) is None
    assert spearman(np.array([1.0, 2.0]), np.array([1.0, 2.0])) is None


def test_the_latest_round_is_kept_and_every_observed_run() -> None:
    trails = Trails()
    cells = [Cell(Scene((batch,), 0.0, "mix"), "high") for batch in (1, 2)]
    for number in (1, 2):
        for cell in cells:
            for begin in (trails.watch, trails.observe):
                begin(cell, "static-4")(step({"a": number}, [0], [1.0] * number), SpeculationPlan())
    assert trails.of(cells[0])["static-4"].lengths() == [[2]]
    assert [trail.lengths() for trail in trails.observed()["high", 0.0]] == [[[1]], [[2]], [[1]], [[2]]]
    assert trails.cells == cells
