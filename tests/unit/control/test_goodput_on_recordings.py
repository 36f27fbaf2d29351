"""Policy `goodput` on recorded drafts of the bench pairs: half of the requests teach it, the others judge it.

Costs are those of the replay's machines, so every figure is the same on any machine.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

import dsde
from dsde.control.controller import Controller
from dsde.control.replay import COSTS, Outcome, replay
from dsde.control.trace import Trace

TRACES = Path(dsde.__file__).parent / "traces"
LENGTHS = (1, 2, 3, 4)


def halves(draft: str, temperature: float) -> tuple[Trace, Trace]:
    trace = Trace.read(TRACES / f"{draft}.jsonl.gz")
    chosen = [index for index, one in enumerate(trace.requests) if one.temperature == temperature]
    return trace.only(chosen[0::2]), trace.only(chosen[1::2])


def judged(draft: str, temperature: float, cost: str, batch: int) -> tuple[Outcome, float]:
    """(goodput on the second half, speed of the best fixed length there)."""
    lessons, exam = halves(draft, temperature)
    controller = Controller("goodput", capacity=batch, max_length=exam.length, trims=True)
    replay("goodput", lessons, COSTS[cost], batch, steps=400 // batch + 60, controller=controller)
    steps = 1600 // batch + 100
    own = replay("goodput", exam, COSTS[cost], batch, steps=steps, controller=controller)
    fixed = (
        replay("static", exam, COSTS[cost], batch, steps=steps, settings={"length": length}).tokens_per_s
        for length in LENGTHS
    )
    return own, max(fixed)


@pytest.mark.parametrize(
    ("draft", "temperature", "cost", "batch", "of_best"),
    [
        ("high", 0.0, "cpu", 1, 1.03),
        ("high", 0.0, "cpu", 8, 0.99),
        ("high", 0.0, "gpu-mixed", 8, 0.99),
        ("high", 1.0, "cpu", 4, 0.97),
        ("low", 0.0, "cpu", 8, 1.15),
        ("low", 0.0, "gpu-mixed", 16, 0.97),
        ("low", 1.0, "gpu-mem", 8, 0.97),
    ],
)
def test_it_is_as_fast_as_the_best_fixed_length_and_as_plain_decoding(
    draft: str, temperature: float, cost: str, batch: int, of_best: float
) -> None:
    own, best = judged(draft, temperature, cost, batch)
    assert own.tokens_per_s >= of_best * best
    assert own.ratio >= 0.99


def test_a_short_unlucky_start_does_not_end_speculation_that_pays() -> None:
    # Here a beginner's first steps go badly, while one draft token a step gains seven percent.
    _, exam = halves("low", 0.0)
    own = replay("goodput", exam, COSTS["gpu-mixed"], 16, steps=300, seed=3)
    assert own.off_share < 0.2
    assert own.ratio > 1.02


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_copy_learns_what_the_original_does(temperature: float) -> None:
    lessons, exam = halves("low", temperature)
    original = Controller("goodput", capacity=2, max_length=exam.length, trims=True)
    copied = copy.deepcopy(original)
    for controller in (original, copied):
        replay("goodput", lessons, COSTS["cpu"], 2, steps=100, controller=controller)
    runs = [replay("goodput", exam, COSTS["cpu"], 2, steps=100, controller=one) for one in (original, copied)]
    assert runs[0] == runs[1]
