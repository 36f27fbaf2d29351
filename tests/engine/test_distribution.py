"""Sampling with speculation draws from the target's own distribution: chi-squared against exact probabilities."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from tests.engine.conftest import VOCABULARY, switch_off_and_on
from tests.engine.test_lossless import POLICIES

PROMPT = [0, 5, 7]
SAMPLES = 6000
# 1 + 4 drafts: tokens 2 and 3 of the answer are accepted, rejected or recovered drafts, never the prefill's own token.
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def engine(start_engine: Any) -> Any:
    return start_engine("static", {"length": 4})


@pytest.fixture(scope="module")
def asynchronous_engine(start_engine: Any) -> Any:
    return start_engine("static", {"length": 4}, asynchronous=True)


def scheduler_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler


def exact_pairs(model_path: str, temperature: float, top_k: int) -> torch.Tensor:
    """P(token 2, token 3) after PROMPT, [V, V], by enumerating every token 1."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def next_token(prefixes: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(prefixes).logits[:, -1].double() / temperature
        if top_k:
            kept = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < kept, -torch.inf)
        return logits.softmax(-1)

    tokens = torch.arange(VOCABULARY)
    prompt = torch.tensor(PROMPT)
    first = next_token(prompt[None])[0]
    after_one = torch.cat([prompt.expand(VOCABULARY, -1), tokens[:, None]], dim=1)
    second = next_token(after_one)
    after_two = torch.cat([after_one.repeat_interleave(VOCABULARY, 0), tokens.repeat(VOCABULARY)[:, None]], dim=1)
    third = next_token(after_two).view(VOCABULARY, VOCABULARY, VOCABULARY)
    return torch.einsum("a,ab,abc->bc", first, second, third)


def p_value(observed: Counter[tuple[int, int]], expected: torch.Tensor) -> float:
    """Chi-squared goodness of fit; cells that expect fewer than five samples are one cell together."""
    counts = torch.zeros_like(expected)
    for cell, count in observed.items():
        counts[cell] = count
    expected = expected * counts.sum()
    large = expected >= 5
    cells = torch.cat([expected[large], expected[~large].sum()[None]])
    seen = torch.cat([counts[large], counts[~large].sum()[None]])
    used = cells > 0
    if seen[~used].any():
        return 0.0
    statistic = ((seen - cells)[used].square() / cells[used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1) / 2, statistic / 2))


def sample(engine: Any, temperature: float, top_k: int, policy: str) -> Counter[tuple[int, int]]:
    from vllm import SamplingParams

    torch.manual_seed(20261130)
    parameters = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        detokenize=False,
        extra_args={"dsde_policy": policy},
    )
    outputs = engine.generate([{"prompt_token_ids": PROMPT}] * SAMPLES, parameters, use_tqdm=False)
    return Counter(tuple(output.outputs[0].token_ids[1:3]) for output in outputs)


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_at_temperature_1_follow_the_target(engine: Any, tiny_pair: tuple[str, str], policy: str) -> None:
    expected = exact_pairs(tiny_pair[0], temperature=1.0, top_k=0)
    assert p_value(sample(engine, 1.0, 0, policy), expected) > 1e-3


def test_temperature_and_top_k_reach_every_position(engine: Any, tiny_pair: tuple[str, str]) -> None:
    expected = exact_pairs(tiny_pair[0], temperature=0.7, top_k=5)
    assert p_value(sample(engine, 0.7, 5, "static"), expected) > 1e-3


def test_the_draft_differs_enough_for_the_test_to_mean_something(tiny_pair: tuple[str, str]) -> None:
    target, draft = (exact_pairs(path, 1.0, 0) for path in tiny_pair)
    assert (target - draft).abs().sum() / 2 > 0.05


def test_a_sampler_that_accepts_every_draft_fails(
    engine: Any, tiny_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(
        rejection_sampler,
        "generate_uniform_probs",
        lambda num_tokens, *_: torch.zeros(num_tokens, dtype=torch.float64),
    )
    expected = exact_pairs(tiny_pair[0], temperature=1.0, top_k=0)
    assert p_value(sample(engine, 1.0, 0, "static"), expected) < 1e-6


def test_a_sampler_with_the_wrong_temperature_fails(
    engine: Any, tiny_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(
        rejection_sampler,
        "expand_batch_to_tokens",
        lambda x, cu_num_tokens, num_tokens, **_: x.new_full((num_tokens,), 2),
    )
    expected = exact_pairs(tiny_pair[0], temperature=1.0, top_k=0)
    assert p_value(sample(engine, 1.0, 0, "static"), expected) < 1e-6


@pytest.mark.parametrize("kind", ["engine", "asynchronous_engine"])
def test_samples_follow_the_target_while_drafting_switches_off_and_on(
    kind: str, tiny_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(kind)
    depths = switch_off_and_on(scheduler_of(engine), monkeypatch)
    expected = exact_pairs(tiny_pair[0], temperature=1.0, top_k=0)
    assert p_value(sample(engine, 1.0, 0, "static"), expected) > 1e-3
    assert {0, 4} <= set(depths)


def test_a_policy_that_peeks_at_the_drawn_token_fails(
    engine: Any, tiny_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.outputs import DraftTokenIds

    scheduler = scheduler_of(engine)
    take = scheduler.update_draft_token_ids

    def peek(drafts: DraftTokenIds) -> None:
        # Verify drafts of large token ids alone: a choice by the very tokens that are to be verified.
        kept = [list(itertools.takewhile(lambda token: token >= 6, tokens)) for tokens in drafts.draft_token_ids]
        take(DraftTokenIds(drafts.req_ids, kept))

    monkeypatch.setattr(scheduler, "update_draft_token_ids", peek)
    expected = exact_pairs(tiny_pair[0], temperature=1.0, top_k=0)
    assert p_value(sample(engine, 1.0, 0, "static"), expected) < 1e-6
