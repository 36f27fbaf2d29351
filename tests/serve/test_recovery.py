"""An engine that dies is noticed, its replica is replaced, and the other one goes on answering."""

from __future__ import annotations

import time
from contextlib import suppress

import grpc
import httpx
import psutil
import pytest

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.serve.conftest import Served

REPLACED_TIMEOUT_S = 240


def engine_cores(served: Served) -> list[psutil.Process]:
    """The engines' own processes of this application."""
    return processes(served, "EngineCore")


def processes(served: Served, name: str) -> list[psutil.Process]:
    """The application's processes whose command line has `name`."""
    found = []
    for one in psutil.Process(served.pid).children(recursive=True):
        # A process may end, or wait as a zombie, while it is asked.
        with suppress(psutil.Error):
            if name in "".join(one.cmdline()):
                found.append(one)
    return found


def test_a_killed_engine_is_replaced_while_the_other_serves(web: httpx.Client, served: Served) -> None:
    victim, survivor = engine_cores(served)
    victim.kill()
    body = {"model": served.model, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4}
    codes: list[int] = []
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while {one.pid for one in engine_cores(served)} <= {victim.pid, survivor.pid} or codes[-8:] != [200] * 8:
        assert time.monotonic() < deadline, f"not replaced within {REPLACED_TIMEOUT_S} s; answers: {codes}"
        codes.append(web.post("/v1/chat/completions", json=body).status_code)
    # What the dead engine had, or is offered before its death is known, may be refused; nothing hangs.
    assert set(codes) <= {200, 503}
    assert survivor.is_running()
    assert web.get("/health").status_code == 200


def test_a_killed_replica_takes_its_engine_along_and_is_replaced(web: httpx.Client, served: Served) -> None:
    victim, survivor = engine_cores(served)
    replica = victim.parent()
    assert replica is not None
    replica.kill()
    victim.wait(30)
    body = {"model": served.model, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4}
    codes: list[int] = []
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while len(engine_cores(served)) < 2 or codes[-8:] != [200] * 8:
        assert time.monotonic() < deadline, f"not replaced within {REPLACED_TIMEOUT_S} s; answers: {codes}"
        codes.append(web.post("/v1/chat/completions", json=body).status_code)
    assert set(codes) <= {200, 503}
    assert survivor.is_running()


def test_a_killed_ingress_ends_its_calls_as_unavailable(served: Served) -> None:
    request = pb.GenerateRequest(prompt="One, two,", sampling=pb.SamplingParams(max_tokens=1500, ignore_eos=True))
    with grpc.insecure_channel(served.address, (("grpc.enable_http_proxy", 0),)) as channel:
        inference = pb_grpc.InferenceStub(channel)
        stream = inference.GenerateStream(request, timeout=REPLACED_TIMEOUT_S)
        next(stream)
        (ingress,) = processes(served, "OpenAIIngress")
        ingress.kill()
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ended.value.details() == "the ingress of this request went away; send it again"
        # A call that comes meanwhile waits for the next ingress.
        assert inference.GetModel(pb.GetModelRequest(), timeout=REPLACED_TIMEOUT_S).name == served.model
