from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsde.control.controller import Controller
from dsde.control.records import SpeculationPlan, StepObservation
from dsde.engine.events import Events
from dsde.engine.tally import Tally
from dsde.engine.transport import attach_step, take_step


def observation(drafted: list[int], accepted: list[int], kld: list[float]) -> StepObservation:
    return StepObservation(
        request_ids=tuple(f"r{index}" for index in range(len(drafted))),
        num_draft_tokens=np.array(drafted, dtype=np.int64),
        num_accepted_tokens=np.array(accepted, dtype=np.int64),
        kld=np.array(kld, dtype=np.float32),
        overlap=np.array(kld, dtype=np.float32),
        temperature=np.zeros(len(drafted), dtype=np.float32),
    )


def test_a_step_is_added_up_and_the_next_starts_from_nothing() -> None:
    tally = Tally()
    with tally:
        sum(range(10_000))
    tally.planned(SpeculationPlan(4, {"r0": 4, "r1": 1, "r2": 0}), [9, 9, 9], fits=True)
    tally.observed(observation([2, 1, 0], [1, 1, 0], [0.5, 0.25, 0.25]))
    step = tally.take("paper")
    assert step._replace(controller_s=0.0)[:12] == ("paper", 3, 3, 2, 5, 1.0, 3, True, 4, 12, 5, "policy")
    assert step.controller_s > 0
    empty = tally.take("paper")
    assert (empty.requests, empty.may_draft, empty.controller_s) == (0, False, 0.0)


@pytest.mark.parametrize(
    ("lengths", "room", "fits", "reason", "may_draft"),
    [
        ({"a": 0}, [5], True, "policy", True),
        ({"a": 0}, [0], True, "room", True),
        ({"a": 0}, [0], False, "context", True),
        ({}, [], True, "room", False),
    ],
)
def test_a_step_without_drafts_says_why(
    lengths: dict[str, int], room: list[int], fits: bool, reason: str, may_draft: bool
) -> None:
    tally = Tally()
    tally.planned(SpeculationPlan(0, lengths), room, fits)
    step = tally.take("paper")
    assert (step.reason, step.may_draft, step.depth) == (reason, may_draft, 0)


@pytest.mark.parametrize(("kept", "accepted"), [(3, 2), (2, 2), (1, 1)])
def test_tokens_behind_an_end_do_not_count(kept: int, accepted: int) -> None:
    tally = Tally()
    tally.observed(observation([2, 1], [2, 1], [0.5, 0.5, 0.5]))
    tally.cut(3, kept)
    tally.cut(2, 2)
    step = tally.take("paper")
    assert (step.emitted, step.accepted) == (kept + 2, accepted + 1)


def test_positions_that_were_not_measured_are_left_out() -> None:
    tally = Tally()
    tally.observed(observation([2], [1], [0.5, float("nan")]))
    step = tally.take("paper")
    assert (step.drafted, step.accepted, step.kld_sum, step.positions) == (2, 1, 0.0, 0)


def test_a_step_rides_on_vllm_s_statistics_and_leaves_them_as_they_were() -> None:
    stats: Any = SimpleNamespace(kv_connector_stats=None)
    step = Tally().take("paper")
    attach_step(stats, step)
    # msgspec makes a list of a tuple on the way.
    stats.kv_connector_stats = {key: list(value) for key, value in stats.kv_connector_stats.items()}
    assert take_step(stats) == step
    assert stats.kv_connector_stats is None
    of_a_connector: Any = SimpleNamespace(kv_connector_stats={"theirs": 1})
    attach_step(of_a_connector, step)
    assert take_step(of_a_connector) is None
    assert of_a_connector.kv_connector_stats == {"theirs": 1}


def test_events_tell_of_calibration_and_of_off_and_on_and_are_bounded() -> None:
    controller = Controller("reference", capacity=2, max_length=4)
    events = Events(controller)
    controller.admit("r0")
    events.admit("r0")
    for step in range(60):
        plan = controller.plan(["r0"], [4])
        shown = SpeculationPlan(4, {"r0": 0 if step in (3, 4) else plan.lengths["r0"]})
        events.planned(shown)
        length = plan.lengths["r0"]
        controller.observe(observation([length], [length], [0.1] * length), plan)
    told = events.finish("r0")
    names = [name.removeprefix("dsde.") for name, _, _ in told]
    assert names[:3] == ["speculation.on", "speculation.off", "speculation.on"]
    assert names.count("calibration.done") == 1
    assert [attributes["dsde.step"] for _, _, attributes in told][:3] == [0, 3, 5]
    assert [at for _, at, _ in told] == sorted(at for _, at, _ in told)
    assert events.finish("r0") == []

    events.admit("r1")
    for step in range(200):
        events.planned(SpeculationPlan(1, {"r1": step % 2}))
    assert len(events.finish("r1")) == 64
