"""An engine that dies is noticed, its replica is replaced, and the other one goes on answering."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from ray.serve.handle import DeploymentHandle

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from deployments.stream_end import GONE
from tests.serve.conftest import Served
from tests.serve.fleet import processes, published, seconds_until, unfinished

REPLACED_TIMEOUT_S = 240
TOLD_TIMEOUT_S = 10


def ask(web: httpx.Client, served: Served) -> int:
    body = {"model": served.model, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4}
    return web.post("/v1/chat/completions", json=body).status_code


def test_a_killed_engine_gets_nothing_new_and_is_replaced(
    web: httpx.Client, served: Served, engines: DeploymentHandle
) -> None:
    def told() -> bool:
        stats = published(engines)
        return len(stats) < 2 or any(one.draining for one in stats)

    seconds_until(lambda: not told(), TOLD_TIMEOUT_S)
    victim, survivor = processes(served, "EngineCore")
    victim.kill()
    seconds_until(told, TOLD_TIMEOUT_S)
    # Its replica has said so, and goes away; everything is answered by the other one meanwhile.
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    codes = []
    while {one.pid for one in processes(served, "EngineCore")} <= {victim.pid, survivor.pid} or told():
        assert time.monotonic() < deadline, f"not replaced within {REPLACED_TIMEOUT_S} s"
        codes.append(ask(web, served))
    codes += [ask(web, served) for _ in range(8)]
    assert set(codes) == {200}
    assert survivor.is_running()
    assert web.get("/health").status_code == 200


def test_a_killed_replica_takes_its_engine_along_and_is_replaced(web: httpx.Client, served: Served) -> None:
    victim, survivor = processes(served, "EngineCore")
    replica = victim.parent()
    assert replica is not None
    replica.kill()
    victim.wait(30)
    codes: list[int] = []
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while len(processes(served, "EngineCore")) < 2 or codes[-8:] != [200] * 8:
        assert time.monotonic() < deadline, f"not replaced within {REPLACED_TIMEOUT_S} s; answers: {codes}"
        codes.append(ask(web, served))
    # What the dead replica had, or is offered before its death is known, goes to the other one.
    assert set(codes) == {200}
    assert survivor.is_running()


def test_a_killed_ingress_ends_its_calls_as_unavailable(served: Served, engines: DeploymentHandle) -> None:
    request = pb.GenerateRequest(prompt="One, two,", sampling=pb.SamplingParams(max_tokens=1500, ignore_eos=True))
    body = {"model": served.model, "prompt": "One, two,", "max_tokens": 1500, "ignore_eos": True}
    with served.channel() as channel, ThreadPoolExecutor(2) as pool, served.web(REPLACED_TIMEOUT_S) as web:
        inference = pb_grpc.InferenceStub(channel)
        stream = inference.GenerateStream(request, timeout=REPLACED_TIMEOUT_S)
        next(stream)
        whole, streamed = (
            pool.submit(web.post, "/v1/completions", json={**body, "stream": it}) for it in (False, True)
        )
        seconds_until(lambda: unfinished(engines) == 3, TOLD_TIMEOUT_S)
        # The event stream has begun.
        seconds_until(lambda: sum(one.running for one in published(engines)) == 3, TOLD_TIMEOUT_S)
        time.sleep(2)
        (ingress,) = processes(served, "OpenAIIngress")
        ingress.kill()
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ended.value.details() == GONE
        answer = whole.result(TOLD_TIMEOUT_S)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == GONE
        *_, last = filter(None, streamed.result(TOLD_TIMEOUT_S).text.split("\n\n"))
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == GONE
        # What nobody waits for any more is not worked on to the end.
        seconds_until(lambda: unfinished(engines) == 0, TOLD_TIMEOUT_S)
        # A call that comes meanwhile waits for the next ingress.
        assert inference.GetModel(pb.GetModelRequest(), timeout=REPLACED_TIMEOUT_S).name == served.model
