"""Ten times what the engines take, at once: what fits and what may queue is answered, all others are refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
import httpx
from ray.serve.handle import DeploymentHandle

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.serve.conftest import Served
from tests.serve.fleet import seconds_until, unfinished

# Two replicas take 64 each, and 256 wait.
TAKEN, QUEUED = 2 * 64, 256
REQUESTS = 10 * TAKEN
TOKENS = 4
TIMEOUT_S = 240
RECOVERY_S = 10.0
PROMPT = "Once upon a time"


@dataclass
class Told:
    """code: HTTP's status or gRPC's. complete: the whole answer came."""

    code: int | grpc.StatusCode
    complete: bool = False
    retry_after: str | None = None


async def over_http(web: httpx.AsyncClient, stream: bool) -> Told:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
    answer = await web.post("/completions", json=body)
    complete = answer.text.endswith("data: [DONE]\n\n") and "error" not in answer.text if stream else True
    return Told(answer.status_code, complete, answer.headers.get("retry-after"))


async def over_grpc(inference: pb_grpc.InferenceStub, key: str) -> Told:
    metadata = (("authorization", f"Bearer {key}"),)
    sampling = pb.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    try:
        request = pb.GenerateRequest(prompt=PROMPT, sampling=sampling)
        answer = await inference.Generate(request, timeout=TIMEOUT_S, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return Told(error.code())
    return Told(grpc.StatusCode.OK, answer.usage.completion_tokens == TOKENS)


async def flood(served: Served) -> list[Told]:
    limits = httpx.Limits(max_connections=None)
    options = {"timeout": TIMEOUT_S, "trust_env": False, "limits": limits, "headers": served.headers}
    async with (
        httpx.AsyncClient(base_url=served.url, **options) as web,
        grpc.aio.insecure_channel(served.address, (("grpc.enable_http_proxy", 0),)) as channel,
    ):
        inference = pb_grpc.InferenceStub(channel)
        asked = [
            over_grpc(inference, served.key) if number % 2 else over_http(web, stream=number % 4 == 0)
            for number in range(REQUESTS)
        ]
        return await asyncio.gather(*asked)


def test_ten_times_the_capacity_is_answered_or_refused_and_leaves_nothing(
    served: Served, engines: DeploymentHandle
) -> None:
    told = asyncio.run(flood(served))
    seconds_until(lambda: unfinished(engines) == 0, RECOVERY_S)

    answered = [one for one in told if one.code in (200, grpc.StatusCode.OK)]
    refused = [one for one in told if one.code in (503, grpc.StatusCode.RESOURCE_EXHAUSTED)]
    assert len(answered) + len(refused) == REQUESTS, {one.code for one in told}
    assert {one.code for one in refused} == {503, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(one.complete for one in answered)
    assert all(one.retry_after == "1" for one in refused if one.code == 503)
    # While requests are refused, others end and make room: few more are answered than fit at once.
    assert len(answered) < 2 * (TAKEN + QUEUED)
