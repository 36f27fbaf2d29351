"""The OpenAI API as a client sees it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.serve.conftest import Served
from tests.serve.figures import check_figures

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_chat_carries_figures_that_agree_with_its_tokens(web: httpx.Client, served: Served) -> None:
    answer = web.post(
        "/v1/chat/completions", json={"model": served.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    ).json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["kv_transfer_params"] is None
    check_figures(answer["metrics"], answer["usage"]["completion_tokens"])


def test_streamed_chat_brings_the_plain_text_and_figures_on_the_usage_chunk(
    client: openai.OpenAI, served: Served
) -> None:
    wanted: dict[str, Any] = {"model": served.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    # Lengths that follow the clock may flip a tie of bfloat16, and with it the text.
    wanted["extra_body"] = {"vllm_xargs": {"dsde_policy": "static"}}
    plain = client.chat.completions.create(**wanted)
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == plain.choices[0].message.content
    *others, last = chunks
    assert all("metrics" not in (chunk.model_extra or {}) for chunk in others)
    assert last.usage == plain.usage or last.usage.completion_tokens == plain.usage.completion_tokens
    check_figures(last.model_extra["metrics"], last.usage.completion_tokens)


def test_streamed_completion_carries_figures(client: openai.OpenAI, served: Served) -> None:
    *_, last = client.completions.create(
        model=served.model,
        prompt="One, two, three,",
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    check_figures(last.model_extra["metrics"], last.usage.completion_tokens)


def test_completion_gives_the_log_probability_of_every_token(client: openai.OpenAI, served: Served) -> None:
    answer = client.completions.create(model=served.model, prompt="One, two, three,", max_tokens=12, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == answer.usage.completion_tokens
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert all(value <= 0 for value in logprobs.token_logprobs)
    check_figures(answer.model_extra["metrics"], answer.usage.completion_tokens)


@pytest.mark.parametrize("temperature", [0, 1])
def test_structured_output_keeps_to_its_schema(client: openai.OpenAI, served: Served, temperature: int) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99}},
        "required": ["capital", "people"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=served.model,
        messages=QUESTION,
        max_tokens=80,
        temperature=temperature,
        seed=7,
        response_format={"type": "json_schema", "json_schema": {"name": "fact", "schema": schema}},
        extra_body={"vllm_xargs": {"dsde_policy": "static"}},
    )
    fact = json.loads(answer.choices[0].message.content)
    assert sorted(fact) == ["capital", "people"]
    assert isinstance(fact["people"], int)
    dsde = check_figures(answer.model_extra["metrics"], answer.usage.completion_tokens)
    # A grammar drops drafts by the tokens drawn, which sampling could not make good: sampled answers go without drafts.
    assert (dsde["steps_off"] == dsde["steps"]) == (temperature > 0)


def test_a_named_tool_is_called_with_its_arguments(client: openai.OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(
        model=served.model,
        messages=QUESTION,
        max_tokens=60,
        temperature=0,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert list(json.loads(call.function.arguments)) == ["city"]


def test_responses_and_tokenize_come_with_the_application(
    client: openai.OpenAI, web: httpx.Client, served: Served
) -> None:
    assert client.responses.create(model=served.model, input="Say hello.", max_output_tokens=8).output_text
    tokens = web.post("/tokenize", json={"model": served.model, "prompt": "One, two"}).json()["tokens"]
    assert web.post("/detokenize", json={"model": served.model, "tokens": tokens}).json()["prompt"] == "One, two"


def test_models_names_the_served_model_and_health_is_good(
    client: openai.OpenAI, web: httpx.Client, served: Served
) -> None:
    assert [model.id for model in client.models.list()] == [served.model]
    assert web.get("/health").status_code == 200


def test_an_unknown_model_is_not_found(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match=f"`nobody` does not exist. Valid aliases: {served.model}"):
        client.chat.completions.create(model="nobody", messages=QUESTION)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(
    ("options", "field", "accepted"),
    [
        ({"dsde_policy": "best"}, "vllm_xargs.dsde_policy", "autoregressive"),
        ({"dsde_max_length": 9}, "vllm_xargs.dsde_max_length", "from 0 to 8"),
        ({"dsde_max_length": "4"}, "vllm_xargs.dsde_max_length", "from 0 to 8"),
        ({"dsde_length": 4}, "vllm_xargs.dsde_length", "dsde_policy, dsde_max_length"),
    ],
)
def test_a_bad_option_is_a_400_that_says_what_is_accepted(
    web: httpx.Client, served: Served, options: dict[str, Any], field: str, accepted: str, stream: bool
) -> None:
    body = {"model": served.model, "messages": QUESTION, "stream": stream, "vllm_xargs": options}
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["type"] == "BadRequestError"
    assert f"{field} = {next(iter(options.values()))!r}" in error["message"]
    assert accepted in error["message"]
