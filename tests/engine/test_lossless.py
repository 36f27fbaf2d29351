"""Greedy text with speculation is the text without it, token by token in float32, while lengths change."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.conftest import VOCABULARY, switch_off_and_on

POLICIES = ("adaedl", "autoregressive", "goodput", "paper", "reference", "static")


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, list[int]]]:
    draw = random.Random(7)
    return [{"prompt_token_ids": [0, *draw.choices(range(2, VOCABULARY), k=draw.randint(2, 40))]} for _ in range(40)]


@pytest.fixture(scope="module")
def engine(start_engine: Any, asynchronous: bool) -> Any:
    return start_engine("static", {"length": 3}, max_length=6, asynchronous=asynchronous)


@pytest.mark.parametrize("policy", [*POLICIES, "mixed"])
def test_tiny_pair_under_every_policy(engine: Any, plain_engine: Any, prompts: list[Any], policy: str) -> None:
    from vllm import SamplingParams

    plain = SamplingParams(temperature=0, max_tokens=60, detokenize=False)
    chosen = POLICIES if policy == "mixed" else (policy,)
    drafted = [
        SamplingParams(
            temperature=0,
            max_tokens=60,
            detokenize=False,
            extra_args={"dsde_policy": chosen[i % len(chosen)], "dsde_max_length": 6 - i % 3},
        )
        for i in range(len(prompts))
    ]
    outputs = engine.generate(prompts, drafted, use_tqdm=False)
    assert tokens(outputs) == tokens(plain_engine.generate(prompts, plain, use_tqdm=False))
    lengths = {output.kv_transfer_params["dsde"]["speculation_length"]["mean"] for output in outputs}
    if policy == "autoregressive":
        assert lengths == {0.0}
    elif policy != "goodput":  # which may find that nothing pays here
        assert len(lengths) > 1


def test_tiny_pair_while_drafting_switches_off_and_on(
    engine: Any, plain_engine: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    depths = switch_off_and_on(engine.llm_engine.engine_core.engine_core.scheduler, monkeypatch)
    # A penalty needs the tokens on the host, which asynchronous scheduling has to fetch.
    parameters = [
        SamplingParams(temperature=0, max_tokens=60, detokenize=False, repetition_penalty=1 + 0.2 * (i % 2))
        for i in range(len(prompts))
    ]
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    assert tokens(outputs) == tokens(plain_engine.generate(prompts, parameters, use_tqdm=False))
    assert {0, 3} <= set(depths)
