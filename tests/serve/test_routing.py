"""The router on the real application: replicas publish, requests spread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from ray.serve.handle import DeploymentHandle

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.serve.conftest import ANSWER_TIMEOUT_S, Served
from tests.serve.fleet import published, seconds_until, taken

PUBLISHED_TIMEOUT_S = 30


def ask(web: httpx.Client, served: Served, headers: dict[str, str] | None = None, **wanted: Any) -> int:
    body = {"model": served.model, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8}
    return web.post("/v1/chat/completions", json={**body, **wanted}, headers=headers).status_code


def test_replicas_publish_what_their_engines_have_learnt(
    web: httpx.Client, served: Served, engines: DeploymentHandle
) -> None:
    with ThreadPoolExecutor(8) as pool:
        options = {"dsde_hint": "colours", "dsde_policy": "static"}
        assert set(pool.map(lambda _: ask(web, served, vllm_xargs=options, max_tokens=24), range(8))) == {200}

    def learnt() -> bool:
        stats = published(engines)
        return len(stats) == 2 and all(one.verify_ms is not None and one.running == 0 for one in stats)

    seconds_until(learnt, PUBLISHED_TIMEOUT_S)
    stats = published(engines)
    for one in stats:
        assert one.verify_ms is not None
        assert one.draft_ms is not None
        assert one.prompt_ms is not None
        assert 0.0 < one.prompt_ms < one.verify_ms[0]
        assert 0.0 < one.draft_ms < one.verify_ms[0] + one.verify_ms[1] * one.slots
        assert (one.slots, one.draining, one.priced) == (32, False, served.policy == "goodput")
    asked = [one.classes["colours/sampled"] for one in stats if "colours/sampled" in one.classes]
    assert 7.0 < sum(one.requests for one in asked) <= 8.0
    assert all(1.0 <= one.output / one.requests <= 24.0 for one in asked)
    assert all(0.0 < one.accepted <= one.drafted for one in asked)
    newest = max(one.number for one in stats)
    seconds_until(lambda: min(one.number for one in published(engines)) > newest, PUBLISHED_TIMEOUT_S)


def test_requests_spread_over_both_replicas(web: httpx.Client, served: Served, engines: DeploymentHandle) -> None:
    before = taken(engines)
    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(lambda _: ask(web, served, max_tokens=24), range(24))) == {200}
    gained = [now - then for then, now in zip(before, taken(engines), strict=True)]
    assert sum(gained) == 24
    assert min(gained) >= 6


def test_a_hint_reaches_the_router_by_header_metadata_and_field(
    web: httpx.Client, served: Served, engines: DeploymentHandle
) -> None:
    assert ask(web, served, {"x-dsde-hint": "by-header"}) == 200
    request = pb.GenerateRequest(prompt="A colour:", sampling=pb.SamplingParams(max_tokens=8))
    with served.channel() as channel:
        inference = pb_grpc.InferenceStub(channel)
        inference.Generate(request, timeout=ANSWER_TIMEOUT_S, metadata=(("x-dsde-hint", "by-metadata"),))
        request.speculation.hint = "by-field"
        inference.Generate(request, timeout=ANSWER_TIMEOUT_S)

    def hints() -> set[str]:
        return {name.partition("/")[0] for one in published(engines) for name in one.classes}

    seconds_until(lambda: hints() >= {"by-header", "by-metadata", "by-field"}, PUBLISHED_TIMEOUT_S)


def test_a_bad_hint_is_a_400_that_names_where_it_stood(web: httpx.Client, served: Served) -> None:
    body = {"model": served.model, "prompt": "A colour:"}
    answer = web.post("/v1/completions", json=body, headers={"x-dsde-hint": "x" * 33})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-dsde-hint")
