"""Figures of real requests in a real engine: their counts agree with the tokens, and nothing stays behind."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.engine.conftest import VOCABULARY


@pytest.fixture(scope="module")
def engine(start_engine: Any) -> Any:
    return start_engine("paper", max_length=5)


def scheduler_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler


def generate(engine: Any, count: int = 12, **parameters: Any) -> list[Any]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [0, *(2 + (i + j) % (VOCABULARY - 2) for j in range(3 + i))]} for i in range(count)]
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 80, "detokenize": False, **parameters})
    return engine.generate(prompts, chosen, use_tqdm=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_agree_with_the_tokens(engine: Any, temperature: float) -> None:
    measured = 0
    for output in generate(engine, temperature=temperature):
        figures = output.kv_transfer_params["dsde"]
        counted = output.outputs[0].spec_decode_metrics
        accepted = sum(j * count for j, count in enumerate(counted.histogram))
        emitted = len(output.outputs[0].token_ids)
        # The prefill emits a token, a step one and its accepted drafts; an end inside the drafts emits no bonus token.
        assert 1 + figures["steps"] + accepted - emitted in (0, 1)
        assert sum(counted.histogram) == figures["steps"] - figures["steps_off"]
        assert counted.num_draft_tokens == pytest.approx(figures["speculation_length"]["mean"] * figures["steps"])
        assert figures["speculation_length"]["max"] <= figures["speculation_length"]["limit"] == 5
        assert figures["policy"] == "paper"
        if figures["steps"] == figures["steps_off"]:
            continue
        measured += 1
        numbers = [*figures["kld"].values(), *figures["wvir"].values(), figures["stability"]]
        assert [number for number in numbers if number is None or not 0 <= number < math.inf] == []
        assert 0 < figures["expected_acceptance_rate"] <= 1
        assert 0 <= figures["stability"] <= 1
    assert measured >= 6


def test_expected_acceptance_is_what_sampling_then_accepts(engine: Any) -> None:
    outputs = generate(
        engine, count=48, temperature=1.0, ignore_eos=True, extra_args={"dsde_policy": "static", "dsde_max_length": 1}
    )
    steps = sum(sum(output.outputs[0].spec_decode_metrics.histogram) for output in outputs)
    accepted = sum(output.outputs[0].spec_decode_metrics.histogram[1] for output in outputs)
    expected = sum(
        output.kv_transfer_params["dsde"]["expected_acceptance_rate"]
        * sum(output.outputs[0].spec_decode_metrics.histogram)
        for output in outputs
    )
    deviation = math.sqrt(steps * 0.25)
    assert steps > 1000
    assert abs(accepted - expected) < 4 * deviation


def test_stragglers_are_booked_where_lengths_differ(engine: Any) -> None:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [0, 5, 6]}] * 3
    lengths = (5, 2, 2)
    parameters = [
        SamplingParams(
            temperature=0,
            max_tokens=60,
            ignore_eos=True,
            detokenize=False,
            extra_args={"dsde_policy": "static", "dsde_max_length": n},
        )
        for n in lengths
    ]
    long, *short = (
        output.kv_transfer_params["dsde"]["straggler"]
        for output in engine.generate(prompts, parameters, use_tqdm=False)
    )
    # The long one waits only where little room is left at its end.
    assert long["caused_ms"] > 10 * long["wait_ms"]
    assert long["steps"] > 0
    assert all(other["wait_ms"] > 10 * other["caused_ms"] for other in short)
    # In every step where it is alone the longest, what it causes is what the two others wait.
    assert long["caused_ms"] <= sum(other["wait_ms"] for other in short) * (1 + 1e-6)


def test_no_speculation_says_so(engine: Any) -> None:
    figures = generate(engine, count=1, extra_args={"dsde_max_length": 0})[0].kv_transfer_params["dsde"]
    assert figures["steps"] == figures["steps_off"] > 0
    assert (figures["kld"]["mean"], figures["stability"], figures["speculation_length"]["max"]) == (None, None, 0)


def test_policy_switches_while_the_engine_runs(engine: Any) -> None:
    engine.collective_rpc("set_speculation_policy", args=("static", {"length": 2}))
    generate(engine, count=1)
    figures = generate(engine, count=1)[0].kv_transfer_params["dsde"]
    assert (figures["policy"], figures["speculation_length"]["max"]) == ("static", 2)
    with pytest.raises(
        ValueError, match=r"fastest.*adaedl, autoregressive, batch_schedule, goodput, paper, reference or static"
    ):
        engine.collective_rpc("set_speculation_policy", args=("fastest", {}))
    engine.collective_rpc("set_speculation_policy", args=("paper", {}))
    generate(engine, count=1)


def test_nothing_is_left_after_the_last_answer(engine: Any) -> None:
    for _ in range(3):
        generate(engine, count=70, max_tokens=12, temperature=1.0)
    assert scheduler_of(engine).controller.live == 0
    assert scheduler_of(engine).controller.ignored_steps == 0


def test_preempted_requests_give_the_same_text(
    start_engine: Any, plain_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A long answer ends in its second block of 128 tokens, and one block is vLLM's own: there is room for 3 of 8.
    tight = start_engine("static", {"length": 3}, num_gpu_blocks_override=8)
    controller, preempted = scheduler_of(tight).controller, []
    preempt = controller.preempt
    monkeypatch.setattr(controller, "preempt", lambda one: (preempted.append(one), preempt(one)))
    outputs = generate(tight, count=8, max_tokens=160, ignore_eos=True)
    expected = generate(plain_engine, count=8, max_tokens=160, ignore_eos=True)
    assert len(set(preempted)) >= 2
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert all(output.kv_transfer_params["dsde"]["steps"] > 0 for output in outputs)
    assert scheduler_of(tight).controller.live == 0
