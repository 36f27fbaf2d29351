"""The same promise on a real model: forty chats of SmolLM2-135M, in float32, with a draft that is often wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import shut_down
from tests.engine.test_lossless import POLICIES, tokens

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
QUESTIONS = (
    "Explain why the sky is blue to a child.",
    "Write a Python function that reverses a list.",
    "What is 17 times 24? Show the steps.",
    "Translate to French: the train leaves at noon.",
    "Name three rivers in Africa and where they end.",
    "Summarise in one sentence: bees visit flowers, carry pollen and help plants make seeds.",
    "Write a short poem about rain.",
    "Who wrote Hamlet, and when?",
    "List five uses of a paper clip.",
    "Give a recipe for pancakes.",
)
SUBJECTS = ("briefly", "in detail", "as a list", "in one paragraph")


@pytest.fixture(scope="module")
def chats() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"{q} Answer {s}."}] for q in QUESTIONS for s in SUBJECTS]


@pytest.fixture(scope="module")
def target() -> str:
    from dsde.models.pairs import pair

    return str(pair("embedded").draft)


@pytest.fixture(scope="module")
def expected(target: str, chats: list[Any]) -> Iterator[list[list[int]]]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=target,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=20,
        enforce_eager=True,
        async_scheduling=False,
        kv_cache_memory_bytes=2**29,
    )
    yield tokens(engine.chat(chats, SamplingParams(temperature=0, max_tokens=NEW_TOKENS), use_tqdm=False))
    shut_down(engine)


@pytest.fixture(scope="module")
def speculating(target: str) -> Iterator[Any]:
    from vllm import LLM

    from dsde.config import DsdeConfig
    from dsde.engine.plugin import engine_arguments
    from dsde.models.pairs import pair

    config = DsdeConfig.model_validate(
        {
            "model": {
                "target": target,
                "draft": str(pair("bench-low").draft),
                "dtype": "float32",
                "max_model_len": 256,
            },
            "speculation": {"policy": "paper", "max_length": 6},
            "engine": {"kv_cache_gib": 0.5, "max_num_seqs": 20},
        }
    )
    engine = LLM(**engine_arguments(config))
    yield engine
    shut_down(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_forty_chats(speculating: Any, chats: list[Any], expected: list[list[int]], policy: str) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, extra_args={"dsde_policy": policy})
    outputs = speculating.chat(chats, parameters, use_tqdm=False)
    assert len(outputs) == 40
    assert tokens(outputs) == expected
