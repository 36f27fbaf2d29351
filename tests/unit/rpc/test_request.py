from __future__ import annotations

from typing import Any

import pytest

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.rpc.request import field_at_fault, openai_body
from dsde.engine.refusal import RequestRefused

HELLO = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")])


def test_a_bare_prompt_says_nothing_else() -> None:
    assert openai_body(pb.GenerateRequest(prompt="Once"), stream=False) == {"prompt": "Once", "stream": False}


def test_zero_is_not_absent() -> None:
    sampling = pb.SamplingParams(temperature=0, top_k=0, seed=0, logprobs=0, ignore_eos=False, presence_penalty=0)
    request = pb.GenerateRequest(prompt="Once", sampling=sampling, speculation=pb.SpeculationOptions(max_length=0))
    assert openai_body(request, stream=True) == {
        "prompt": "Once",
        "stream": True,
        "temperature": 0,
        "top_k": 0,
        "seed": 0,
        "logprobs": 0,
        "ignore_eos": False,
        "presence_penalty": 0,
        "vllm_xargs": {"dsde_max_length": 0},
    }


def test_every_field_reaches_a_completion() -> None:
    plain: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": -(2**63),
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "stop": ["\n", "END"],
        "stop_token_ids": [2, 0],
        "max_tokens": 32,
        "min_tokens": 4,
        "ignore_eos": True,
        "logprobs": 3,
    }
    assert plain.keys() | {"json_schema", "regex"} == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[1, 2]),
        sampling=pb.SamplingParams(**plain, regex="a+"),
        speculation=pb.SpeculationOptions(policy="static", max_length=3, hint="code"),
        model="embedded",
        request_id="mine",
    )
    assert openai_body(request, stream=False) == {
        **plain,
        "prompt": [1, 2],
        "stream": False,
        "structured_outputs": {"regex": "a+"},
        "vllm_xargs": {"dsde_policy": "static", "dsde_max_length": 3, "dsde_hint": "code"},
        "model": "embedded",
        "request_id": "mine",
    }


def test_a_chat_has_the_chat_api_s_names() -> None:
    request = pb.GenerateRequest(
        chat=HELLO, sampling=pb.SamplingParams(max_tokens=5, logprobs=2, json_schema='{"type": "object"}')
    )
    assert openai_body(request, stream=True) == {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "structured_outputs": {"json": '{"type": "object"}'},
    }


@pytest.mark.parametrize(
    ("request_", "field", "accepted"),
    [
        (pb.GenerateRequest(), "input", "prompt, prompt_token_ids or chat"),
        (pb.GenerateRequest(prompt="Once", request_id="x" * 129), "request_id", "at most 128"),
        (pb.GenerateRequest(chat=pb.Chat()), "chat.messages", "at least one"),
        (pb.GenerateRequest(prompt_token_ids=pb.TokenIds()), "prompt_token_ids.ids", "at least one"),
        (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5, -1])), "prompt_token_ids.ids", "holds -1"),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[*HELLO.messages, pb.ChatMessage(role="boss")])),
            "chat.messages[1].role",
            "system, user or assistant",
        ),
    ],
)
def test_what_no_body_can_say_is_refused(request_: pb.GenerateRequest, field: str, accepted: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        openai_body(request_, stream=False)
    assert refused.value.status == 400
    named, text = field_at_fault(request_, refused.value)
    assert named == field
    assert text.startswith(f"{field} ")
    assert accepted in text


@pytest.mark.parametrize(
    ("parameter", "message", "field", "text"),
    [
        ("temperature", "temperature must be non-negative, got -1.0.", "sampling.temperature", None),
        (None, "min_p must be in [0, 1], got 2.0.", "sampling.min_p", None),
        (None, "stop cannot contain an empty string.", "sampling.stop", None),
        ("top_logprobs", "too many (got 50)", "sampling.logprobs", None),
        ("max_completion_tokens", "too many", "sampling.max_tokens", None),
        ("structured_outputs", "no schema", "sampling.json_schema", "sampling.json_schema = '{}': no schema"),
        (None, "Grammar error: no", "sampling.json_schema", "sampling.json_schema = '{}': Grammar error: no"),
        ("input_tokens", "too long", "chat", None),
        (None, "Token id 1000000 is out of vocabulary", "chat", None),
        ("prompt", "too long", "chat", None),
        ("messages.0.content", "no text", "chat.messages.0.content", None),
        (
            "vllm_xargs.dsde_policy",
            "vllm_xargs.dsde_policy = 'best': accepted: paper",
            "speculation.policy",
            "speculation.policy = 'best': accepted: paper",
        ),
        ("x-dsde-hint", "x-dsde-hint = '': accepted: a name", "x-dsde-hint", "x-dsde-hint = '': accepted: a name"),
        (None, "the engine wants to stop, seed in hand", None, "the engine wants to stop, seed in hand"),
    ],
)
def test_vllm_s_field_becomes_the_message_s(
    parameter: str | None, message: str, field: str | None, text: str | None
) -> None:
    request = pb.GenerateRequest(chat=HELLO, sampling=pb.SamplingParams(json_schema="{}"))
    expected = text or f"{field}: {message}"
    assert field_at_fault(request, RequestRefused(400, message, parameter)) == (field, expected)
