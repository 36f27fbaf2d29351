"""Ring, slots and calibration of the history."""

import random

import numpy as np
import pytest

from dsde.control.history import WINDOW, History, Newest, Recent
from dsde.control.measured import Measured
from dsde.control.records import StepObservation

Step = tuple[list[int], list[list[float]], list[int], float]
"""Slots, the KLDs and the accepted drafts of each, and their temperature."""


def measured(*steps: Step) -> Measured:
    return Measured(
        [
            (
                np.array(slots),
                StepObservation(
                    request_ids=tuple(map(str, slots)),
                    num_draft_tokens=np.array([len(kld) for kld in klds]),
                    num_accepted_tokens=np.array(accepted),
                    kld=np.array([value for kld in klds for value in kld]),
                    overlap=np.array([0.5 for kld in klds for _ in kld]),
                    temperature=np.full(len(slots), temperature),
                ),
                np.zeros(len(slots), dtype=np.bool_),
            )
            for slots, klds, accepted, temperature in steps
        ]
    )


def append(
    history: History, slots: list[int], klds: list[list[float]], accepted: list[int], temperature: float = 0.0
) -> None:
    history.append(measured((slots, klds, accepted, temperature)))


def newest(history: History, slot: int) -> list[float]:
    recent = history.recent(np.array([slot]))
    count = int(recent.count[0])
    return recent.kld[0, WINDOW - count :].tolist()


def test_ragged_steps_stand_in_order_of_age() -> None:
    history = History(3)
    a, b, c = (history.allocate(30) for _ in range(3))
    append(history, [c, a, b], [[1.0, 2.0], [], [3.0]], [0, 0, 0])
    append(history, [a, b, c], [[4.0], [5.0, 6.0, 7.0], [8.0]], [0, 0, 0])
    assert newest(history, a) == [4.0]
    assert newest(history, b) == [3.0, 5.0, 6.0, 7.0]
    assert newest(history, c) == [1.0, 2.0, 8.0]


def test_the_ring_keeps_the_newest_window() -> None:
    history = History(2)
    a, b = history.allocate(30), history.allocate(30)
    for step in range(14):
        append(history, [a, b], [[step * 3.0 + i for i in range(3)], [100.0 + step]], [0, 0])
    assert newest(history, a) == [float(value) for value in range(12, 42)]
    assert newest(history, b) == [100.0 + step for step in range(14)]


def test_one_step_longer_than_the_window_keeps_its_newest() -> None:
    history = History(2)
    a, b = history.allocate(30), history.allocate(30)
    append(history, [a, b], [[float(value) for value in range(70)], [0.5]], [0, 0])
    append(history, [a, b], [[70.0], [0.25]], [0, 0])
    assert newest(history, a) == [float(value) for value in range(41, 71)]
    assert newest(history, b) == [0.5, 0.25]


def test_calibration_counts_draft_tokens_and_then_freezes() -> None:
    history = History(1)
    slot = history.allocate(5)
    append(history, [slot], [[0.1, 0.3]], [2])
    append(history, [slot], [[0.2]], [0])
    assert history.recent(np.array([slot])).calibrating.item()
    # 3 < 5 tokens so far, so this step still belongs to the calibration: (.1 + .3 + .2 + .6 + .3) / 5 = .3.
    append(history, [slot], [[0.6, 0.3]], [1])
    append(history, [slot], [[9.0, 9.0, 9.0]], [3], temperature=0.5)
    recent = history.recent(np.array([slot]))
    assert not recent.calibrating.item()
    assert (recent.accepted_max.item(), recent.full_steps.item()) == (2.0, 1.0)
    assert recent.kld_mean_pre.item() == pytest.approx(0.3)
    assert recent.kld_max_pre.item() == pytest.approx(0.6)
    assert (recent.kld_last.item(), recent.temperature.item()) == (9.0, 0.5)


def test_an_unusable_step_leaves_the_signals_and_counts_its_tokens() -> None:
    history = History(1)
    slot = history.allocate(4)
    append(history, [slot], [[0.25, 0.75]], [1])
    append(history, [slot], [[float("nan"), 3.0]], [2])
    recent = history.recent(np.array([slot]))
    assert newest(history, slot) == [0.25, 0.75]
    assert (recent.kld_last.item(), recent.kld_mean_pre.item(), recent.kld_max_pre.item()) == (0.5, 0.5, 0.75)
    assert (recent.calibrating.item(), recent.accepted_max.item()) == (False, 2.0)


@pytest.mark.parametrize("seed", range(5))
def test_steps_appended_together_are_steps_appended_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    together, single = History(4), History(4)
    for history in (together, single):
        for warmup in (0, 5, 20, 60):
            history.allocate(warmup)
    for _ in range(6):
        steps: list[Step] = []
        for _ in range(rng.randint(1, 9)):
            slots = rng.sample(range(4), rng.randint(1, 4))
            klds = [[rng.random() for _ in range(rng.choice((0, 1, 3, 40)))] for _ in slots]
            if klds[0] and rng.random() < 0.2:
                klds[0][0] = float("nan")
            steps.append((slots, klds, [rng.randint(0, len(kld)) for kld in klds], rng.random()))
        at_once = together.append(measured(*steps))
        parts = [single.append(measured(step)) for step in steps]
        for name in ("kld", "count", "kld_last", "temperature"):
            rows = np.concatenate([getattr(part, name) for part in parts])
            assert getattr(at_once, name).tolist() == rows.tolist()
        one, other = (history.recent(np.arange(4)) for history in (together, single))
        for name in Newest.__slots__ + Recent.__slots__:
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


def test_a_slot_is_empty_when_it_is_allocated_again() -> None:
    history = History(1)
    slot = history.allocate(1)
    append(history, [slot], [[0.5] * 40], [40])
    history.release(slot)
    again = history.allocate(30)
    recent = history.recent(np.array([again]))
    assert (again, history.used) == (slot, 1)
    assert not recent.kld.any()
    assert (recent.count.item(), recent.accepted_max.item(), recent.calibrating.item()) == (0, 0.0, True)


def test_capacity_is_hard() -> None:
    history = History(2)
    history.allocate(30)
    history.allocate(30)
    with pytest.raises(RuntimeError, match="all 2 history slots"):
        history.allocate(30)
    with pytest.raises(ValueError, match="capacity 0"):
        History(0)


def test_a_changed_warmup_counts_the_tokens_verified_so_far() -> None:
    history = History(1)
    slot = history.allocate(30)
    append(history, [slot], [[0.1] * 10], [0])
    history.set_warmup(np.array([slot]), 10)
    assert not history.recent(np.array([slot])).calibrating.item()
