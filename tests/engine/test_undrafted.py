"""What vLLM does not offer together with drafts works without them, beside requests that have some."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dsde.engine.vllm_internals import take_without_drafts
from tests.engine.conftest import VOCABULARY

BIASED = {3: 4.0, 5: -4.0}


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
    assert min(lengths(drafted)[::2]) > 0
