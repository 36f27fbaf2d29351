"""Ten times what the engines take: what does not fit is refused, the others are answered, and all is as before."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

import grpc
import httpx
import psutil
from ray.serve.handle import DeploymentHandle

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.serve.conftest import Served
from tests.serve.fleet import processes, seconds_until, unfinished

# Two replicas take 64 each, and 256 wait.
TAKEN, QUEUED = 2 * 64, 256
REQUESTS = 10 * TAKEN
# Under way at once: twice as many as are taken or may wait.
AT_ONCE = 2 * (TAKEN + QUEUED)
TOKENS = 4
TIMEOUT_S = 240
RECOVERY_S = 10.0
GROWTH = 400 * 2**20
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
    options = {"timeout": TIMEOUT_S, "trust_env": False, "headers": served.headers}
    async with (
        httpx.AsyncClient(base_url=served.url, limits=httpx.Limits(max_connections=None), **options) as web,
        grpc.aio.insecure_channel(served.address, (("grpc.enable_http_proxy", 0),)) as channel,
    ):
        inference, room = pb_grpc.InferenceStub(channel), asyncio.Semaphore(AT_ONCE)

        async def ask(number: int) -> Told:
            async with room:
                over = over_grpc(inference, served.key) if number % 2 else over_http(web, stream=number % 4 == 0)
                return await over

        return await asyncio.gather(*map(ask, range(REQUESTS)))


def memory(served: Served) -> dict[str, int]:
    """Bytes of the processes that hold requests, by what they are."""
    names = ("OpenAIIngress", "ProxyActor", "EngineReplica")
    return {
        name: sum(one.memory_info().rss for one in processes(served, name) if one.status() != psutil.STATUS_ZOMBIE)
        for name in names
    }


def seconds(web: httpx.Client) -> float:
    start = time.monotonic()
    assert web.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": TOKENS}).status_code == 200
    return time.monotonic() - start


def test_ten_times_the_capacity_is_answered_or_refused_and_leaves_nothing(
    served: Served, engines: DeploymentHandle, web: httpx.Client
) -> None:
    seconds(web)
    before_s = statistics.median(seconds(web) for _ in range(5))
    before = memory(served)
    told = asyncio.run(flood(served))
    over = time.monotonic()
    seconds_until(lambda: unfinished(engines) == 0, RECOVERY_S)

    answered = [one for one in told if one.code in (200, grpc.StatusCode.OK)]
    refused = [one for one in told if one.code in (503, grpc.StatusCode.RESOURCE_EXHAUSTED)]
    assert len(answered) + len(refused) == REQUESTS, {one.code for one in told}
    assert refused
    assert all(one.complete for one in answered)
    assert all(one.retry_after == "1" for one in refused if one.code == 503)
    for name, size in memory(served).items():
        assert size - before[name] < GROWTH, (name, before[name], size)
    while statistics.median(seconds(web) for _ in range(3)) > 2 * before_s + 0.2:
        assert time.monotonic() - over < RECOVERY_S
