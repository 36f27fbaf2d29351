"""A request that brings the tokens of another engine gets exactly the rest of its answer, token by token in float32."""

from __future__ import annotations

import random
from math import exp
from typing import Any

import pytest

from dsde.engine.transport import EMITTED_KEY
from tests.engine.conftest import VOCABULARY

LENGTH = 48
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 30, "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": [7], "min_tokens": 20},
    "not drafted": {"extra_args": {"dsde_policy": "autoregressive"}},
    "logprobs": {"logprobs": 2},
}


@pytest.fixture(scope="module")
def engine(start_engine: Any) -> Any:
    # Prompts are read in several steps, so a continued request also waits amid its own tokens.
    return start_engine("static", {"length": 3}, max_length=4, max_num_seqs=16, max_num_batched_tokens=160)


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, list[int]]]:
    draw = random.Random(11)
    return [{"prompt_token_ids": [0, *draw.choices(range(2, VOCABULARY), k=draw.randint(2, 90))]} for _ in range(12)]


def sampling(emitted: list[int], **options: Any) -> Any:
    from vllm import SamplingParams

    extra = {**options.pop("extra_args", {}), **({EMITTED_KEY: emitted} if emitted else {})}
    wanted = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False, **options}
    return SamplingParams(**wanted, extra_args=extra)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_rest_is_the_rest(engine: Any, prompts: list[Any], name: str) -> None:
    options = OPTIONS[name]
    whole = [
        list(one.outputs[0].token_ids) for one in engine.generate(prompts, sampling([], **options), use_tqdm=False)
    ]
    assert len({tuple(one) for one in whole}) > 6
    draw = random.Random(3)
    # The second time the prefix cache has the answer's own blocks.
    for _ in range(2):
        cuts = [draw.randint(1, len(one) - 1) for one in whole]
        given = [one[:cut] for one, cut in zip(whole, cuts, strict=True)]
        outputs = engine.generate(prompts, [sampling(one, **options) for one in given], use_tqdm=False)
        for expected, cut, output in zip(whole, cuts, outputs, strict=True):
            (answer,) = output.outputs
            assert list(answer.token_ids) == expected[cut:]
            # Its first step reads a prompt, as a new request's does.
            figures, counted = output.kv_transfer_params["dsde"], answer.spec_decode_metrics
            accepted = sum(length * steps for length, steps in enumerate(counted.histogram))
            assert 0 <= 1 + figures["steps"] + accepted - len(expected[cut:]) <= 4
            assert name != "not drafted" or figures["steps"] == len(expected[cut:]) - 1
            if "logprobs" in options:
                assert [next(iter(place)) for place in answer.logprobs] == expected[cut:]


def test_a_prefix_cache_may_reach_into_what_it_brings(engine: Any) -> None:
    block = engine.llm_engine.vllm_config.cache_config.block_size
    prompt = [{"prompt_token_ids": [0, *[3, 4] * (block // 2 - 5)]}]
    (whole,) = engine.generate(prompt, sampling([]), use_tqdm=False)
    ids = list(whole.outputs[0].token_ids)
    assert len(prompt[0]["prompt_token_ids"]) < block < len(prompt[0]["prompt_token_ids"]) + 20
    (rest,) = engine.generate(prompt, sampling(ids[:40]), use_tqdm=False)
    assert list(rest.outputs[0].token_ids) == ids[40:]


def test_a_sampled_continuation_follows_the_target_s_distribution(engine: Any) -> None:
    prompt, emitted, draws = {"prompt_token_ids": [0, 4, 5]}, [6, 7, 8], 1500
    (place,) = engine.generate([prompt], sampling([], max_tokens=1), use_tqdm=False)
    assert place.outputs[0].token_ids
    extended = {"prompt_token_ids": [0, 4, 5, 6, 7, 8]}
    (scored,) = engine.generate([extended], sampling([], max_tokens=1, logprobs=VOCABULARY), use_tqdm=False)
    expected = {token: exp(one.logprob) for token, one in scored.outputs[0].logprobs[0].items()}
    outputs = engine.generate([prompt] * draws, sampling(emitted, temperature=1.0, max_tokens=4), use_tqdm=False)
    found = [output.outputs[0].token_ids[0] for output in outputs]
    for token, probability in expected.items():
        spread = (probability * (1 - probability) / draws) ** 0.5
        assert abs(found.count(token) / draws - probability) < 4.5 * spread + 1e-3, token


@pytest.mark.parametrize("bad", [[VOCABULARY], [-1], ["3"], [True], list(range(2, 10)) * 8])
def test_what_no_engine_can_have_given_is_ignored(engine: Any, bad: list[Any]) -> None:
    prompt = [{"prompt_token_ids": [0, 4, 5]}]
    whole, told = (engine.generate(prompt, sampling(one), use_tqdm=False)[0] for one in ([], bad))
    assert list(told.outputs[0].token_ids) == list(whole.outputs[0].token_ids)


def test_nothing_of_a_request_is_kept(engine: Any, prompts: list[Any]) -> None:
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    engine.generate(prompts, sampling([5, 6]), use_tqdm=False)
    assert (scheduler._brought, scheduler._unknown, scheduler.requests) == ({}, set(), {})
