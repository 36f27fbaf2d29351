"""Two replicas as one server: load on both, aborts, policies per request and for all."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ray.serve.handle import DeploymentHandle

from deployments.serve import switch_policy
from tests.serve.conftest import Served
from tests.serve.figures import check_figures
from tests.serve.fleet import seconds_until, taken, unfinished

STORY = [{"role": "user", "content": "Write a long story about the sea."}]
MIXED = [
    "What is the capital of France?",
    "Count from one to twenty.",
    "Write a short poem about rain.",
    "Explain what a queue is to a child, with an example from everyday life. " * 8,
]


def chat(web: httpx.Client, served: Served, **wanted: Any) -> dict[str, Any]:
    body = {"model": served.model, "messages": STORY, "max_tokens": 32, **wanted}
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_sixteen_mixed_prompts_reach_both_replicas_with_figures(
    web: httpx.Client, served: Served, engines: DeploymentHandle
) -> None:
    before = taken(engines)

    def ask(number: int) -> dict[str, Any]:
        message = {"role": "user", "content": MIXED[number % len(MIXED)]}
        return chat(web, served, messages=[message], max_tokens=8 + 4 * number, temperature=number % 2)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))

    for answer in answers:
        dsde = check_figures(answer["metrics"], answer["usage"]["completion_tokens"])
        assert dsde["policy"] == served.policy
    after = taken(engines)
    assert sum(after) - sum(before) == 16
    assert all(now > then for then, now in zip(before, after, strict=True))
    assert unfinished(engines) == 0


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_disconnect_aborts_the_request_within_a_second(
    served: Served, engines: DeploymentHandle, stream: bool
) -> None:
    body = {"model": served.model, "messages": STORY, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    connection = http.client.HTTPConnection(served.url.removeprefix("http://").removesuffix("/v1"), timeout=60)
    headers = {"Content-Type": "application/json", **served.headers}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers=headers)
    if stream:
        assert connection.getresponse().read(200).startswith(b"data: ")
    seconds_until(lambda: unfinished(engines) == 1, 60)
    connection.close()
    assert seconds_until(lambda: unfinished(engines) == 0, 60) < 1.0


def test_a_request_chooses_its_own_policy_and_longest_length(web: httpx.Client, served: Served) -> None:
    answer = chat(web, served, vllm_xargs={"dsde_policy": "static", "dsde_max_length": 2}, temperature=0)
    dsde = check_figures(answer["metrics"], answer["usage"]["completion_tokens"])
    assert dsde["policy"] == "static"
    assert dsde["speculation_length"] == {"mean": pytest.approx(2, abs=0.5), "max": 2, "limit": 2}

    off = chat(web, served, vllm_xargs={"dsde_policy": "autoregressive"}, temperature=0)
    dsde = check_figures(off["metrics"], off["usage"]["completion_tokens"])
    assert (dsde["policy"], dsde["steps"], dsde["steps_off"]) == ("autoregressive", 31, 31)
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    # bfloat16 may flip a tie between two ways to compute the same logits, so only the first words are compared.
    assert off["choices"][0]["message"]["content"][:8] == answer["choices"][0]["message"]["content"][:8]


def test_the_policy_switches_while_the_application_serves(
    web: httpx.Client, served: Served, engines: DeploymentHandle
) -> None:
    def policy_and_longest() -> tuple[str, int]:
        dsde = chat(web, served, max_tokens=12)["metrics"]["speculative_decoding"]["dsde"]
        return dsde["policy"], dsde["speculation_length"]["max"]

    before = taken(engines)
    with pytest.raises(ValueError, match="length"):
        switch_policy("static", {"length": 99}, served.dashboard)
    switch_policy("static", {"length": 3}, served.dashboard)
    seconds_until(lambda: policy_and_longest() == ("static", 3), 60)
    switch_policy(served.policy, {}, served.dashboard)
    seconds_until(lambda: policy_and_longest()[0] == served.policy, 60)
    # The same replicas, counting on: nothing was restarted.
    assert sum(taken(engines)) > sum(before)
