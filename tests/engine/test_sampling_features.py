"""What a request may ask of sampling gives the same with drafts as without, or goes without drafts, in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dsde.engine.vllm_internals import take_without_drafts
from tests.engine.conftest import VOCABULARY

BIASED = {3: 4.0, 5: -4.0}
FEATURES: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -1.0},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "min_tokens": {"min_tokens": 20},
    "ignore_eos": {"ignore_eos": True},
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 2": {"max_tokens": 2},
    "stop_token_ids": {"stop_token_ids": [5]},
    "allowed_token_ids": {"allowed_token_ids": [2, 3, 4, 7]},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
}


@pytest.fixture(scope="module")
def engine(start_engine: Any) -> Any:
    started = start_engine("static", {"length": 3}, max_length=4)
    take_without_drafts(started.llm_engine.input_processor)
    return started


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, list[int]]]:
    draw = random.Random(11)
    return [{"prompt_token_ids": [0, *draw.choices(range(2, VOCABULARY), k=draw.randint(2, 30))]} for _ in range(24)]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def lengths(outputs: list[Any]) -> list[float]:
    return [output.kv_transfer_params["dsde"]["speculation_length"]["mean"] for output in outputs]


def logprobs(places: Any) -> list[dict[int, float]]:
    return [{token: one.logprob for token, one in (place or {}).items()} for place in places or ()]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_gives_the_same_with_drafts(
    engine: Any, plain_engine: Any, prompts: list[dict[str, list[int]]], feature: str
) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(**{"temperature": 0, "max_tokens": 40, "detokenize": False, **FEATURES[feature]})
    drafted = engine.generate(prompts, parameters, use_tqdm=False)
    plain = plain_engine.generate(prompts, parameters, use_tqdm=False)
    assert tokens(drafted) == tokens(plain)
    assert [one.outputs[0].finish_reason for one in drafted] == [one.outputs[0].finish_reason for one in plain]
    for ours, theirs in zip(drafted, plain, strict=True):
        pairs = [(ours.outputs[0].logprobs, theirs.outputs[0].logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)]
        for measured, expected in pairs:
            for place, wanted in zip(logprobs(measured), logprobs(expected), strict=True):
                assert place == pytest.approx(wanted, abs=1e-4)
    # Of two tokens the first comes with the prompt, and the second needs no draft.
    if feature not in ("max_tokens 1", "max_tokens 2"):
        assert max(lengths(drafted)) > 0


@pytest.mark.parametrize(
    ("usual", "special"),
    [
        ({"temperature": 0}, {"logit_bias": BIASED}),
        ({"temperature": 1}, {"logit_bias": BIASED}),
        ({"temperature": 1}, {"min_p": 0.4}),
    ],
    ids=["greedy bias", "sampled bias", "min_p"],
)
def test_every_other_request_has_it(
    engine: Any, plain_engine: Any, prompts: list[Any], usual: dict[str, Any], special: dict[str, Any]
) -> None:
    from vllm import SamplingParams

    def parameters(**more: Any) -> list[Any]:
        return [
            SamplingParams(max_tokens=30, detokenize=False, seed=number, **usual, **(more if number % 2 else {}))
            for number in range(len(prompts))
        ]

    drafted = engine.generate(prompts, parameters(**special), use_tqdm=False)
    plain = plain_engine.generate(prompts, parameters(**special), use_tqdm=False)
    without = plain_engine.generate(prompts, parameters(), use_tqdm=False)
    assert tokens(drafted)[1::2] == tokens(plain)[1::2]
    # It does something here, and the others are not touched by it.
    assert tokens(plain)[1::2] != tokens(without)[1::2]
    if usual["temperature"] == 0:
        assert tokens(drafted)[::2] == tokens(without)[::2]
    assert set(lengths(drafted)[1::2]) == {0.0}
    assert sum(lengths(drafted)[::2]) > 0
