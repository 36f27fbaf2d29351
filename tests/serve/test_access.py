"""Who is let in by the running application, over HTTP and gRPC, and what is too much for it."""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import suppress

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.collector import Collector
from tests.serve.conftest import Served, dsde_keys
from tests.serve.fleet import seconds_until

GUARDED = ["/v1/models", "/v1/chat/completions", "/metrics", "/tokenize", "/invocations", "/openapi.json", "/load", "/"]
FOLLOWED_TIMEOUT_S = 10
PATIENCE_S = 30
SHORT = pb.GenerateRequest(prompt="One, two,", sampling=pb.SamplingParams(max_tokens=2))


def anonymous(served: Served, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=served.url.removesuffix("/v1"), trust_env=False, timeout=60, headers=headers)


def call(served: Served, key: str | None) -> grpc.StatusCode:
    with grpc.insecure_channel(served.address, (("grpc.enable_http_proxy", 0),)) as channel:
        metadata = (("authorization", f"Bearer {key}"),) if key else None
        answered = pb_grpc.InferenceStub(channel).Generate.future(SHORT, timeout=60, metadata=metadata)
        assert key is None or key not in answered.details()
        return answered.code()


@pytest.mark.parametrize("path", GUARDED)
def test_everything_but_health_asks_for_a_key(served: Served, path: str) -> None:
    with anonymous(served) as web:
        for answer in (web.get(path), web.post(path, json={})):
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == 401
        assert web.get("/health").status_code == 200


def test_health_needs_no_key_over_grpc(served: Served) -> None:
    with grpc.insecure_channel(served.address, (("grpc.enable_http_proxy", 0),)) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_key_lives_from_its_making_to_its_revocation(served: Served) -> None:
    key = dsde_keys("add", "guest", "--file", str(served.keys))

    def status() -> int:
        with anonymous(served, Authorization=f"Bearer {key}") as web:
            return web.get("/v1/models").status_code

    seconds_until(lambda: status() == 200, FOLLOWED_TIMEOUT_S)
    assert call(served, key) is grpc.StatusCode.OK
    assert call(served, key[:-1]) is grpc.StatusCode.UNAUTHENTICATED
    assert call(served, None) is grpc.StatusCode.UNAUTHENTICATED
    dsde_keys("revoke", key, "--file", str(served.keys))
    seconds_until(lambda: status() == 401, FOLLOWED_TIMEOUT_S)
    assert call(served, key) is grpc.StatusCode.UNAUTHENTICATED


def test_one_key_s_requests_and_tokens_are_counted_over_both_protocols(served: Served) -> None:
    few = dsde_keys("add", "few", "--file", str(served.keys), "--requests-per-minute", "2")
    short = dsde_keys("add", "short", "--file", str(served.keys), "--tokens-per-minute", "1")
    with anonymous(served, Authorization=f"Bearer {few}") as web:
        seconds_until(lambda: web.get("/v1/models").status_code == 200, FOLLOWED_TIMEOUT_S)
        assert call(served, few) is grpc.StatusCode.OK
        refused = web.get("/v1/models")
    assert (refused.status_code, call(served, few)) == (429, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "2 requests a minute" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    # The first is let in and leaves the minute overdrawn.
    assert call(served, short) is grpc.StatusCode.OK
    assert call(served, short) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_body_over_the_limit_is_refused_before_it_is_read(served: Served, web: httpx.Client) -> None:
    host, port = served.url.removeprefix("http://").removesuffix("/v1").split(":")
    start = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=30) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n{")
        answer = b"".join(iter(lambda: line.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"limits.message_mib = 4 MiB" in answer
    assert time.monotonic() - start < 5

    with anonymous(served) as other, suppress(httpx.WriteError, httpx.ReadError):
        # In chunks, of which nobody says beforehand how many there will be.
        assert other.post("/v1/completions", content=(b" " * 2**16 for _ in range(80))).status_code == 413
    assert web.get("/v1/models").status_code == 200


@pytest.mark.parametrize("size", [40_000, 2**20])
def test_a_header_over_the_limit_is_refused(served: Served, web: httpx.Client, size: int) -> None:
    with anonymous(served) as other:
        try:
            answer = other.get("/v1/models", headers={"x-long": "x" * size})
            assert answer.status_code in (400, 431)
            assert "header is too large" in answer.text
        except (httpx.WriteError, httpx.ReadError):
            # Closed while the client still wrote.
            assert size > 40_000
    assert web.get("/v1/models").status_code == 200


def test_metadata_over_the_limit_is_refused(served: Served) -> None:
    with served.channel(("grpc.max_metadata_size", 2**24), ("grpc.absolute_max_metadata_size", 2**24)) as channel:
        stub = pb_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(SHORT, timeout=30, metadata=(("x-long", "x" * 2**20),))
        assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert stub.Generate(SHORT, timeout=60).finish_reason


def test_no_key_and_no_prompt_is_in_any_log_span_or_error(
    served: Served, received: Collector, web: httpx.Client
) -> None:
    prompt, unknown, trace = "a-prompt-that-nobody-logs", f"dsde_{'0' * 12}_{'a' * 43}", uuid.uuid4().hex
    secrets = (prompt, unknown, served.key)
    web.headers["traceparent"] = f"00-{trace}-{uuid.uuid4().hex[:16]}-01"
    assert web.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).status_code == 200
    with anonymous(served, Authorization=f"Bearer {unknown}") as stranger:
        errors = [
            web.post("/v1/completions", json={"prompt": prompt, "max_tokens": -1}),
            web.post("/v1/completions", json={"prompt": prompt, "model": "nobody"}),
            web.post(
                "/v1/completions", content=f'{{"prompt": "{prompt}"', headers={"content-type": "application/json"}
            ),
            stranger.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}),
        ]
    assert [error.status_code for error in errors] == [400, 404, 400, 401]
    assert call(served, served.key) is grpc.StatusCode.OK
    assert call(served, unknown) is grpc.StatusCode.UNAUTHENTICATED
    received.wait(
        lambda: all(part in str(received.trace(trace)) for part in ("proxy", "OpenAIIngress", "llm_request")),
        PATIENCE_S,
        "the spans of a request",
    )
    written = {path: path.read_text(errors="replace") for path in served.logs()}
    written |= {"spans": str(received.spans), "errors": " ".join(error.text for error in errors)}
    assert len(written) > 5
    assert [(where, secret) for where, text in written.items() for secret in secrets if secret in text] == []


@pytest.mark.parametrize("path", ["/api/serve/applications/", "/api/jobs/", "/nodes?view=summary"])
def test_ray_s_dashboard_asks_for_a_token(served: Served, path: str) -> None:
    assert httpx.get(f"{served.dashboard}{path}", trust_env=False, timeout=30).status_code == 401


def test_nothing_but_the_engines_processes_listens_beyond_this_machine(served: Served) -> None:
    server = psutil.Process(served.pid)
    listening = [
        (process.name(), one.laddr.ip, one.laddr.port)
        for process in (server, *server.children(recursive=True))
        for one in process.net_connections("inet")
        # PyTorch's rendezvous store takes no address to listen on; every engine has one.
        if one.status == psutil.CONN_LISTEN and "EngineCore" not in process.name()
    ]
    assert len(listening) > 5
    assert [each for each in listening if each[1] not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")] == []
