"""Steps and events of a real engine, as its telemetry gets them, beside vLLM's own loggers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dsde.telemetry.step import EngineStep

TRACED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Booked:
    def __init__(self) -> None:
        self.steps: list[EngineStep] = []
        self.most_running = 0
        self.running = 0

    def load(self, running: int, waiting: int) -> None:
        self.running, self.most_running = running, max(self.most_running, running)

    def step(self, step: EngineStep) -> None:
        self.steps.append(step)


@pytest.fixture(scope="module")
def booked() -> Booked:
    return Booked()


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[str, str], booked: Booked) -> Iterator[Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from dsde.config import DsdeConfig
    from dsde.engine.plugin import engine_arguments
    from dsde.engine.stat_logger import EngineLoad

    target, draft = tiny_pair
    config = DsdeConfig.model_validate(
        {
            "model": {"target": target, "draft": draft, "dtype": "float32", "max_model_len": 256},
            "speculation": {"policy": "reference", "max_length": 4},
            "engine": {"kv_cache_gib": 0.25, "max_num_seqs": 8},
        }
    )
    arguments = {**engine_arguments(config), "skip_tokenizer_init": True}
    arguments["additional_config"]["dsde"]["telemetry"] = True
    telemetry: Any = SimpleNamespace(metrics=booked, registry=False)
    running = LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=EngineLoad(telemetry).loggers())
    yield running
    running.engine_core.shutdown()
    gc.collect()


def answer(engine: Any, booked: Booked, requests: dict[str, dict[str, Any]], headers: Any = None) -> dict[str, Any]:
    from vllm import SamplingParams

    booked.steps.clear()
    for number, (request_id, wanted) in enumerate(requests.items()):
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, **wanted)
        engine.add_request(request_id, {"prompt_token_ids": [0, 3, 5 + number]}, sampling, trace_headers=headers)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def test_steps_add_up_to_what_the_requests_say(engine: Any, booked: Booked) -> None:
    done = answer(engine, booked, {"a": {}, "b": {"extra_args": {"dsde_max_length": 1}}})
    figures = [output.kv_transfer_params["dsde"] for output in done.values()]
    spec = [output.outputs[0].spec_decode_metrics for output in done.values()]
    steps = booked.steps
    assert sum(step.requests for step in steps) == sum(one["steps"] for one in figures)
    assert sum(step.drafted for step in steps) == sum(one.num_draft_tokens for one in spec) > 0
    emitted = sum(one["steps"] for one in figures) + sum(step.accepted for step in steps)
    assert sum(step.emitted for step in steps) == emitted
    positions = sum(step.positions for step in steps)
    means = [one["kld"]["mean"] * one_spec.num_draft_tokens for one, one_spec in zip(figures, spec, strict=True)]
    assert positions == sum(one.num_draft_tokens for one in spec)
    assert sum(step.kld_sum for step in steps) == pytest.approx(sum(means), rel=1e-4)
    assert {step.policy for step in steps} == {"reference"}
    assert all(step.controller_s > 0 for step in steps)
    apart = [step for step in steps if step.depth > 1 and step.used < step.slots]
    assert apart
    assert (booked.most_running, booked.running) == (2, 0)
    assert all("dsde_events" not in output.kv_transfer_params for output in done.values())


def test_tokens_behind_an_end_are_in_no_step(engine: Any, booked: Booked) -> None:
    stops = {name: {"stop_token_ids": [5 + number]} for number, name in enumerate("stuvwx")}
    done = answer(engine, booked, stops)
    answers = [output.outputs[0] for output in done.values()]
    # The prefill's token is of no verification step.
    assert sum(step.emitted for step in booked.steps) == sum(len(one.token_ids) - 1 for one in answers)
    counted = [one.spec_decode_metrics.histogram for one in answers]
    accepted = sum(length * steps for one in counted for length, steps in enumerate(one))
    assert sum(step.accepted for step in booked.steps) == accepted > 0


def test_a_step_without_drafts_says_that_nobody_has_room(engine: Any, booked: Booked) -> None:
    answer(engine, booked, {"c": {}})
    off = [step for step in booked.steps if step.may_draft and not step.depth]
    assert off
    assert {step.reason for step in off} == {"room"}
    answer(engine, booked, {"d": {"extra_args": {"dsde_policy": "autoregressive"}}})
    assert {step.reason for step in booked.steps if step.may_draft} == {"policy", "room"}
    assert all(step.depth == 0 for step in booked.steps)


def test_a_traced_request_brings_its_events(engine: Any, booked: Booked) -> None:
    done = answer(engine, booked, {"e": {}}, TRACED)
    events = done["e"].kv_transfer_params["dsde_events"]
    names = [name for name, _, _ in events]
    assert names[0] == "dsde.speculation.on"
    assert names[-1] == "dsde.speculation.off"
    assert "dsde.calibration.done" in names
    scheduler = engine.engine_core.engine_core.scheduler
    assert scheduler._events._requests == {}
