"""What a request may ask of its text gives the same with drafts as without, on a real model in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import shut_down

pytestmark = pytest.mark.slow

QUESTIONS = [
    f"{question} {style}"
    for question in ("Name a river.", "Why is the sky blue?", "What is 17 times 24?")
    for style in ("Be brief.", "Explain.")
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "length": {"enum": [1, 2, 3]}},
    "required": ["name", "length"],
    "additionalProperties": False,
}
FEATURES: dict[str, dict[str, Any]] = {
    "stop": {"stop": [" the", "?"]},
    "stop, kept": {"stop": [" the", "?"], "include_stop_str_in_output": True},
    "stop after min_tokens": {"stop": [" the", "?"], "min_tokens": 12},
    "bad_words": {"bad_words": ["the", "is"]},
    "json": {"structured_outputs": {"json": SCHEMA}},
    "regex": {"structured_outputs": {"regex": "(yes|no), because [a-z ]{5,20}\\."}},
    "choice": {"structured_outputs": {"choice": ["never", "sometimes", "always"]}},
}


def start(target: str, **more: Any) -> Any:
    from vllm import LLM

    return LLM(**{"model": target, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 24, **more})


@pytest.fixture(scope="module")
def target() -> str:
    from dsde.models.pairs import pair

    return str(pair("embedded").draft)


@pytest.fixture(scope="module")
def plain(target: str) -> Iterator[Any]:
    engine = start(target, enforce_eager=True, async_scheduling=False, kv_cache_memory_bytes=2**28)
    yield engine
    shut_down(engine)


@pytest.fixture(scope="module")
def drafting(target: str) -> Iterator[Any]:
    from dsde.config import from_values
    from dsde.engine.plugin import engine_arguments
    from dsde.engine.vllm_internals import take_without_drafts
    from dsde.models.pairs import pair

    config = from_values(
        {
            "model": {
                "target": target,
                "draft": str(pair("bench-low").draft),
                "dtype": "float32",
                "max_model_len": 256,
            },
            "speculation": {"policy": "static", "settings": {"length": 3}, "max_length": 4},
            "engine": {"kv_cache_gib": 0.5, "max_num_seqs": 24},
        }
    )
    engine = start(target, **engine_arguments(config))
    take_without_drafts(engine.llm_engine.input_processor)
    yield engine
    shut_down(engine)


@pytest.fixture(scope="module")
def without(plain: Any) -> list[Any]:
    """The answers to a request for nothing special."""
    return ask(plain)


def ask(engine: Any, **wanted: Any) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if "structured_outputs" in wanted:
        wanted["structured_outputs"] = StructuredOutputsParams(**wanted["structured_outputs"])
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return engine.chat(chats, SamplingParams(**{"max_tokens": 32, "temperature": 0, **wanted}), use_tqdm=False)


def answers(outputs: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (one.text, tuple(one.token_ids), one.finish_reason, one.stop_reason)
        for output in outputs
        for one in output.outputs
    ]


def drafted(outputs: list[Any]) -> list[float]:
    return [output.kv_transfer_params["dsde"]["speculation_length"]["mean"] for output in outputs]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_gives_the_same_text_with_drafts(drafting: Any, plain: Any, without: list[Any], feature: str) -> None:
    ours, theirs = ask(drafting, **FEATURES[feature]), ask(plain, **FEATURES[feature])
    assert answers(ours) == answers(theirs)
    # It does something here, and drafts were made, but for one of three words.
    assert answers(theirs) != answers(without)
    assert max(drafted(ours)) > 0 or feature == "choice"
    if feature == "json":
        whole = [json.loads(one.outputs[0].text) for one in ours if one.outputs[0].finish_reason == "stop"]
        assert [set(one) for one in whole] == [set(SCHEMA["properties"])] * len(whole)
        assert whole


@pytest.mark.parametrize("more", [{"min_p": 0.05}, {"extra_args": {"dsde_max_length": 0}}], ids=["min_p", "no drafts"])
def test_several_seeded_answers_without_drafts_are_those_of_the_plain_engine(
    drafting: Any, plain: Any, more: dict[str, Any]
) -> None:
    wanted = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 12, **more}
    assert answers(ask(drafting, **wanted)) == answers(ask(plain, **wanted))


def test_several_answers_with_drafts_are_several(drafting: Any) -> None:
    told = answers(ask(drafting, n=3, temperature=1.0, max_tokens=12))
    assert len(told) == 3 * len(QUESTIONS)
    assert len(set(told)) > 2 * len(QUESTIONS)
