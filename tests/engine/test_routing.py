"""What a live engine tells routers, from a real engine's finished requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from dsde.engine.remote import GenerateCall
from dsde.engine.routing import RoutingRecord
from dsde.engine.stat_logger import EngineLoad
from dsde.engine.transport import ENGINE_KEY, FIGURES_KEY
from dsde.routing.request import HINT


@pytest.fixture(scope="module")
def engine(start_engine: Any) -> Any:
    return start_engine("goodput", max_length=4)


def finished(engine: Any, count: int, **parameters: Any) -> list[tuple[GenerateCall, Any]]:
    prompts = [{"prompt_token_ids": [0, 2 + number % 8, 3, 4]} for number in range(count)]
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, **parameters)
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [(GenerateCall(one, sampling, "r"), output) for one, output in zip(prompts, outputs, strict=True)]


def test_costs_and_classes_come_with_finished_requests(engine: Any) -> None:
    record = RoutingRecord(slots=64, policy="goodput")
    first = record.publish(EngineLoad(), 0, draining=False)
    assert (first.number, first.verify_ms, first.draft_ms, first.prompt_ms) == (1, None, None, None)
    assert first.priced

    calls = finished(engine, 12, extra_args={HINT: "toys"})
    drafted = 0
    for call, output in calls:
        assert output.kv_transfer_params[ENGINE_KEY]["policy"] == "goodput"
        record.finish(call, output)
        assert set(output.kv_transfer_params) == {FIGURES_KEY}
        drafted += output.outputs[0].spec_decode_metrics.num_draft_tokens

    stats = record.publish(EngineLoad(), 0, draining=False)
    cost = engine.llm_engine.engine_core.engine_core.scheduler.controller.cost
    assert stats.verify_ms is not None
    # The figures of the last answer, on a line that was learnt further since.
    (base, token), (newest_base, newest_token) = stats.verify_ms, cost.line
    assert base + 12 * token == pytest.approx(newest_base + 12 * newest_token, rel=0.5)
    assert stats.draft_ms is not None
    assert stats.draft_ms > 0.0
    assert stats.number == 2
    for name in ("toys/greedy", "greedy"):
        assert stats.classes[name].output / stats.classes[name].requests == pytest.approx(40.0, abs=1.0)
    # Twelve requests, each older one weighing 2 % less.
    assert stats.classes["toys/greedy"].requests == pytest.approx(sum(0.98**age for age in range(12)))
    assert 0.8 * drafted < stats.classes["greedy"].drafted <= drafted

    # What a prompt adds to a step is known once a step without one has been measured.
    assert stats.prompt_ms is None
    record.finish(*finished(engine, 1)[0])
    prompt_ms = record.publish(EngineLoad(), 0, draining=False).prompt_ms
    assert prompt_ms is not None
    assert 0.0 <= prompt_ms < 10 * base


def test_several_answers_to_one_prompt_teach_costs_and_no_class() -> None:
    record = RoutingRecord(slots=5, policy="paper")
    call = GenerateCall({"prompt_token_ids": [1]}, SamplingParams(n=2), "r")
    costs = {"verify": [20.0, 0.1], "draft": 1.5, "prompt": 0.2, "policy": "paper"}
    output: Any = SimpleNamespace(kv_transfer_params={FIGURES_KEY: {"steps": 3}, ENGINE_KEY: costs}, outputs=[1, 2])
    record.finish(call, output)
    stats = record.publish(EngineLoad(), 0, draining=False)
    assert (stats.verify_ms, stats.prompt_ms, stats.classes) == ((20.0, 0.1), 0.2, {})


def test_a_count_of_a_step_that_is_over_does_not_outlive_the_requests() -> None:
    load = EngineLoad()
    load.record(
        SimpleNamespace(num_running_reqs=5, num_waiting_reqs=3, num_skipped_waiting_reqs=0, kv_cache_usage=0.25), None
    )
    record = RoutingRecord(slots=5, policy="paper")
    busy, idle = record.publish(load, 9, draining=False), record.publish(load, 0, draining=True)
    assert (busy.running, busy.waiting, busy.kv_use, busy.priced, busy.draining) == (5, 4, 0.25, False, False)
    assert (idle.running, idle.waiting, idle.draining) == (0, 0, True)


def test_the_straggler_share_is_the_part_of_decoding_time_that_requests_waited() -> None:
    record = RoutingRecord(slots=5, policy="paper")
    call = GenerateCall({"prompt_token_ids": [1]}, SamplingParams(), "r")
    for wait_ms, seconds in ((300.0, 2.0), (0.0, 1.0)):
        figures = {"steps": 3, "speculation_length": {"mean": 2.0}, "straggler": {"wait_ms": wait_ms}}
        output: Any = SimpleNamespace(
            kv_transfer_params={FIGURES_KEY: figures},
            outputs=[SimpleNamespace(spec_decode_metrics=None)],
            metrics=SimpleNamespace(first_token_ts=7.0, last_token_ts=7.0 + seconds),
        )
        record.finish(call, output)
    stats = record.publish(EngineLoad(), 0, draining=False)
    assert stats.straggler_share == pytest.approx(0.9 * 0.3 / (0.9 * 2.0 + 1.0))
