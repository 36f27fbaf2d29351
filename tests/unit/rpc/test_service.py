"""What a call ends in, with a stand-in for vLLM: status, details, and what was released."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.rpc import service
from deployments.rpc.service import InferenceService
from dsde.access.gate import Gate
from dsde.access.keyring import Keyring
from dsde.access.keys import new_key, write_keys
from dsde.config import LimitsConfig
from dsde.engine.refusal import RequestRefused

REQUEST = pb.GenerateRequest(prompt="Once")


class Context:
    def __init__(self, **metadata: str) -> None:
        self._metadata = list(metadata.items())
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailing: list[tuple[str, bytes]] = []

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def peer(self) -> str:
        return "ipv6:%5B::1%5D:50000"

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, bytes]]) -> None:
        self.trailing = trailing_metadata


class Generation:
    """Yields two tokens, then raises `error`, if any, else finishes."""

    model_name = "model"

    def __init__(self, error: Exception | None = None, refuses: Exception | None = None) -> None:
        self.closed = False
        self._error = error
        self._refuses = refuses

    async def healthy(self) -> bool:
        return True

    async def start(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> SimpleNamespace:
        if self._refuses is not None:
            raise self._refuses
        return SimpleNamespace(request_id="id", num_prompt_tokens=1, outputs=self._outputs())

    async def _outputs(self) -> AsyncGenerator[SimpleNamespace, None]:
        try:
            for token_id, reason in ((5, None), (6, "stop")):
                if reason and self._error is not None:
                    raise self._error
                completion = {"text": "a", "token_ids": [token_id], "finish_reason": reason, "logprobs": None}
                one = SimpleNamespace(**completion, stop_reason=None, spec_decode_metrics=None)
                yield SimpleNamespace(outputs=[one], num_cached_tokens=None)
        finally:
            self.closed = True


OPEN = Gate(None, LimitsConfig(), 1)


def serving(generation: Generation, gate: Gate = OPEN) -> InferenceService:
    one = InferenceService()
    one.offer(generation, gate, 8)  # type: ignore[arg-type]
    return one


async def streamed(generation: Generation, context: Context) -> list[pb.GenerateResponse]:
    return [message async for message in serving(generation).GenerateStream(REQUEST, context)]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, grpc.StatusCode.INVALID_ARGUMENT),
        (404, grpc.StatusCode.NOT_FOUND),
        (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (501, grpc.StatusCode.UNIMPLEMENTED),
        (503, grpc.StatusCode.UNAVAILABLE),
        (500, grpc.StatusCode.INTERNAL),
        (418, grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_refusal_becomes_a_status(status: int, code: grpc.StatusCode) -> None:
    context = Context()
    refused = Generation(refuses=RequestRefused(status, "because"))
    assert await serving(refused).Generate(REQUEST, context) == pb.GenerateResponse()
    assert (context.code, context.details) == (code, "because")
    assert await streamed(refused, context) == [pb.GenerateResponse()]


async def test_a_full_queue_refuses_before_the_request_is_read() -> None:
    context, one, generation = Context(), InferenceService(), Generation()
    one.offer(generation, OPEN, 8, lambda: True)  # type: ignore[arg-type]
    assert await one.Generate(pb.GenerateRequest(), context) == pb.GenerateResponse()
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_bad_field_stands_in_the_details() -> None:
    context = Context()
    await serving(Generation(refuses=RequestRefused(400, "must be positive, got -1", "top_p"))).Generate(
        REQUEST, context
    )
    ((name, value),) = context.trailing
    status = Status.FromString(value)
    violations = BadRequest()
    assert name == "grpc-status-details-bin"
    assert status.details[0].Unpack(violations)
    assert (status.code, status.message) == (3, "sampling.top_p: must be positive, got -1")
    assert [one.field for one in violations.field_violations] == ["sampling.top_p"]


async def test_a_long_text_fits_the_trailers() -> None:
    context = Context()
    await serving(Generation(refuses=RequestRefused(400, "x" * 50_000, "top_p"))).Generate(REQUEST, context)
    assert len(context.details) == 1000
    assert len(context.trailing[0][1]) < 4096


async def test_a_stream_that_fails_keeps_what_it_said_and_releases_the_request() -> None:
    generation, context = Generation(error=RequestRefused(503, "went away; send it again")), Context()
    first, last = await streamed(generation, context)
    assert (first.text, last) == ("a", pb.GenerateResponse())
    assert (context.code, context.details) == (grpc.StatusCode.UNAVAILABLE, "went away; send it again")
    assert generation.closed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_shows_nothing_of_itself(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    generation, context = Generation(error=KeyError("/secret/path")), Context()
    if stream:
        await streamed(generation, context)
    else:
        await serving(generation).Generate(REQUEST, context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert "secret" not in context.details
    assert "KeyError" not in context.details
    assert "/secret/path" in caplog.text


@pytest.fixture
def guarded(tmp_path: Path) -> tuple[Gate, str]:
    """A gate with one key, one request at a time, and that key."""
    key, sent = new_key("alice", datetime.now(UTC), concurrency=1)
    write_keys(tmp_path / "keys.json", [key])
    return Gate(Keyring(tmp_path / "keys.json"), LimitsConfig(), 8), sent


async def test_a_wrong_key_is_unauthenticated_everywhere_but_in_health(guarded: tuple[Gate, str]) -> None:
    gate, sent = guarded
    one = serving(Generation(), gate)
    for call, empty in ((one.Generate, REQUEST), (one.GetModel, pb.GetModelRequest())):
        for metadata in ({"authorization": f"Bearer {sent[:-1]}"}, {}):
            context = Context(**metadata)
            await call(empty, context)  # type: ignore[operator]
            assert context.code is grpc.StatusCode.UNAUTHENTICATED
    context = Context(authorization=f"Bearer {sent}")
    await one.Generate(REQUEST, context)
    assert context.code is None
    context = Context(authorization="Bearer wrong")
    answer = await one.Check(health_pb2.HealthCheckRequest(), context)
    assert (answer.status, context.code) == (health_pb2.HealthCheckResponse.SERVING, None)


async def test_a_key_s_requests_are_counted_until_their_streams_end(guarded: tuple[Gate, str]) -> None:
    gate, sent = guarded
    one, metadata = serving(Generation(), gate), {"authorization": f"Bearer {sent}"}
    stream = one.GenerateStream(REQUEST, Context(**metadata))
    await anext(stream)
    context = Context(**metadata)
    await one.Generate(REQUEST, context)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "accepted: 1 at a time" in context.details
    ((_, value),) = context.trailing
    told = RetryInfo()
    assert Status.FromString(value).details[0].Unpack(told)
    assert told.retry_delay.ToMilliseconds() == 1000
    await stream.aclose()
    context = Context(**metadata)
    await one.Generate(REQUEST, context)
    assert context.code is None


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.7:50000", "ipv6:%5B2001:db8::1%5D:50000", "unix:/tmp/socket", ""])
async def test_without_keys_another_machine_is_refused(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "peer", lambda self: peer)
    context = Context()
    await serving(Generation()).Generate(REQUEST, context)
    assert context.code is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(("told", "let_in"), [("10.0.0.7", False), ("127.0.0.1, 10.0.0.7", False), ("::1", True)])
async def test_who_is_behind_a_proxy_on_this_machine_is_not_on_it(told: str, let_in: bool) -> None:
    context = Context(**{"x-forwarded-for": told})
    await serving(Generation()).Generate(REQUEST, context)
    assert context.code is (None if let_in else grpc.StatusCode.PERMISSION_DENIED)


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:50000", "ipv6:%5B::1%5D:50000", "ipv6:[::ffff:127.0.0.1]:5"])
async def test_without_keys_this_machine_is_let_in(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "peer", lambda self: peer)
    context = Context()
    await serving(Generation()).Generate(REQUEST, context)
    assert context.code is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_releases_the_request(stream: bool) -> None:
    generation = Generation()
    taken = asyncio.Event()
    forever = asyncio.Event()

    async def outputs() -> AsyncGenerator[SimpleNamespace, None]:
        try:
            taken.set()
            await forever.wait()
            yield SimpleNamespace()
        finally:
            generation.closed = True

    generation._outputs = outputs  # type: ignore[method-assign]
    call = streamed(generation, Context()) if stream else serving(generation).Generate(REQUEST, Context())
    task = asyncio.ensure_future(call)
    await taken.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert generation.closed


async def test_health_knows_its_services() -> None:
    generation = Generation()
    one = serving(generation)
    context = Context()
    for name in ("", "dsde.v1.Inference"):
        answer = await one.Check(health_pb2.HealthCheckRequest(service=name), context)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert context.code is None
    await one.Check(health_pb2.HealthCheckRequest(service="other"), context)
    assert context.code is grpc.StatusCode.NOT_FOUND
    assert set((await one.List(health_pb2.HealthListRequest(), Context())).statuses) == {"", "dsde.v1.Inference"}


async def test_watching_says_each_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_WATCH_PERIOD_S", 0.0)
    generation = Generation()
    seen = iter([True, True, False, False, True])

    async def healthy() -> bool:
        return next(seen)

    generation.healthy = healthy  # type: ignore[method-assign]
    said = serving(generation).Watch(health_pb2.HealthCheckRequest(), Context())
    statuses = [(await anext(said)).status for _ in range(3)]
    await said.aclose()
    assert [health_pb2.HealthCheckResponse.ServingStatus.Name(one) for one in statuses] == [
        "SERVING",
        "NOT_SERVING",
        "SERVING",
    ]


async def test_watching_ends_so_that_a_server_can_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_WATCH_PERIOD_S", 0.0)
    context = Context()
    said = serving(Generation()).Watch(health_pb2.HealthCheckRequest(), context)
    assert {one.status async for one in said} == {health_pb2.HealthCheckResponse.SERVING}
    assert context.code is grpc.StatusCode.UNAVAILABLE
