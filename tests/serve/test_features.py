"""What a request may ask besides: its prompt back, an id that another one has."""

from __future__ import annotations

import json

import httpx

LONG = {"prompt": "One, two,", "max_tokens": 80, "temperature": 0, "ignore_eos": True, "request_id": "the-same"}


def test_echo_gives_the_prompt_and_then_the_answer(web: httpx.Client) -> None:
    body = {"prompt": "One, two, three,", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    plain = web.post("/v1/completions", json=body).json()["choices"][0]
    echoed = web.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]
    assert echoed["text"] == body["prompt"] + plain["text"]
    assert echoed["logprobs"]["tokens"][-8:] == plain["logprobs"]["tokens"]
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert len(echoed["logprobs"]["tokens"]) > 8


def test_an_id_that_a_running_request_has_ends_neither(web: httpx.Client) -> None:
    streamed = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
    with web.stream("POST", "/v1/completions", json=streamed) as first:
        lines = (line.removeprefix("data: ") for line in first.iter_lines() if line.startswith("data: "))
        told = [next(lines)]
        # One that is answered, and one whose client leaves it.
        short = web.post("/v1/completions", json={**LONG, "max_tokens": 2})
        with web.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as dropped:
            assert next(dropped.iter_lines())
        told += lines
    assert (short.status_code, short.json()["usage"]["completion_tokens"]) == (200, 2)
    assert told.pop() == "[DONE]"
    *texts, usage = map(json.loads, told)
    assert texts[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == LONG["max_tokens"]
