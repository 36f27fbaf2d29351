from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsde.bench.cell import Cell, Scene
from dsde.bench.record import Recorder
from dsde.control.records import SpeculationPlan, StepObservation
from dsde.control.trace import Trace

CELL = Cell(Scene((2,), 1.0, "mix"), "high")


def step(ids: tuple[str, ...], counts: list[int], accepted: list[int], base: float) -> StepObservation:
    total = sum(counts)
    return StepObservation(
        request_ids=ids,
        num_draft_tokens=np.array(counts),
        num_accepted_tokens=np.array(accepted),
        kld=base + 0.1 * np.arange(total),
        overlap=np.full((total,), 0.5),
        temperature=np.ones(len(ids)),
        draft_ids=ids,
        draft_top_prob=base / 10 + 0.01 * np.arange(2 * len(ids)).reshape(len(ids), 2),
        draft_entropy=np.full((len(ids), 2), base),
    )


def test_a_round_is_a_drafting_and_the_verification_after_it(tmp_path: Path) -> None:
    recorder = Recorder(length=2)
    on_step = recorder.observe(CELL, "static-2, observed")
    for observation in (
        step(("code-1-x", "math-2-y"), [2, 2], [1, 0], 1.0),
        # The batch's order changed; math-2 was cut to one draft.
        step(("math-2-y", "code-1-x"), [1, 2], [1, 2], 2.0),
        step(("code-1-x", "math-2-y"), [2, 2], [0, 1], 3.0),
    ):
        on_step(observation, SpeculationPlan())
    file = tmp_path / "trace.jsonl.gz"
    assert recorder.write(file, {"draft": "high"}) == 2
    trace = Trace.read(file)
    assert (trace.length, trace.notes) == (2, {"draft": "high"})
    requests = {one.request_id: one for one in trace.requests}
    code, math = requests["code-1-x"], requests["math-2-y"]
    assert (code.workload, code.temperature, math.workload) == ("code", 1.0, "math")
    assert [one.accepted for one in code.rounds] == [2, 0]
    # Drafted at the end of step 1, where it was first of the batch; verified in step 2, after math-2's one slot.
    assert code.rounds[0].top_prob == pytest.approx((0.10, 0.11))
    assert code.rounds[0].kld == pytest.approx((2.1, 2.2))
    assert code.rounds[1].top_prob == pytest.approx((0.22, 0.23))
    # The short drafting is left out; the one after it, drafted first in its batch, is whole.
    assert [one.accepted for one in math.rounds] == [1]
    assert math.rounds[0].top_prob == pytest.approx((0.20, 0.21))
    assert math.rounds[0].entropy == pytest.approx((2.0, 2.0))


def test_what_was_not_measured_is_not_recorded() -> None:
    recorder = Recorder(length=1)
    on_step = recorder.observe(CELL, "static-1, observed")
    first = step(("a-1",), [1], [0], 1.0)
    nan = StepObservation(
        request_ids=("a-1",),
        num_draft_tokens=np.array([1]),
        num_accepted_tokens=np.array([0]),
        kld=np.array([float("nan")]),
        overlap=np.array([0.5]),
        temperature=np.ones(1),
    )
    on_step(first, None)
    on_step(nan, None)
    on_step(first, None)
    assert recorder.trace({}).requests == ()
