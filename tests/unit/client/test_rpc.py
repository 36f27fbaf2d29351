"""The client against a real gRPC server, whose answers are made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from dsde.client.exchange import Answer, ClientError, Question
from dsde.client.rpc import ask_grpc

QUESTION = Question("Why?", system="Be brief.", max_tokens=5, temperature=0.0, policy="static")
LAST = pb.GenerateResponse(
    text=" so",
    request_id="id",
    model="embedded",
    finish_reason=pb.FINISH_REASON_LENGTH,
    usage=pb.Usage(prompt_tokens=3, completion_tokens=2),
    speculation=pb.SpeculationStats(num_draft_tokens=0, dsde=pb.Dsde(kld=pb.Dsde.Kld())),
)


class Servicer(pb_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.request = pb.GenerateRequest()
        self.key: Any = None
        self.cancelled = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        self.request = request
        self.key = dict(context.invocation_metadata()).get("authorization")
        return LAST

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        if request.speculation.policy == "best":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "speculation.policy = 'best': accepted: paper")
        yield pb.GenerateResponse(text="Just")
        try:
            if request.speculation.policy == "slow":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        yield LAST


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Servicer, str]]:
    servicer, server = Servicer(), grpc.aio.server()
    pb_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_the_question_arrives_whole() -> None:
    async with served() as (servicer, address):
        parts = [part async for part in ask_grpc(QUESTION, address, "secret", stream=False)]
    assert servicer.key == "Bearer secret"
    assert servicer.request == pb.GenerateRequest(
        chat=pb.Chat(
            messages=[
                pb.ChatMessage(role="system", content="Be brief."),
                pb.ChatMessage(role="user", content="Why?"),
            ]
        ),
        sampling=pb.SamplingParams(max_tokens=5, temperature=0.0),
        speculation=pb.SpeculationOptions(policy="static"),
    )
    text, answer = parts
    assert text == " so"
    assert isinstance(answer, Answer)
    assert (answer.finish_reason, answer.completion_tokens) == ("length", 2)
    # Zero is a figure, absent is none.
    assert answer.speculation is not None
    assert (answer.speculation["num_draft_tokens"], answer.speculation["dsde"]["kld"]) == (0, {})


async def test_a_stream_comes_in_pieces() -> None:
    async with served() as (_, address):
        *texts, answer = [part async for part in ask_grpc(QUESTION, address, None, stream=True)]
    assert texts == ["Just", " so"]
    assert isinstance(answer, Answer)


async def test_a_refusal_is_told() -> None:
    async with served() as (_, address):
        with pytest.raises(ClientError, match=r"INVALID_ARGUMENT: speculation.policy = 'best'"):
            [part async for part in ask_grpc(Question("?", policy="best"), address, None, stream=True)]


async def test_closing_cancels_the_call() -> None:
    async with served() as (servicer, address):
        parts = ask_grpc(Question("?", policy="slow"), address, None, stream=True)
        assert await anext(parts) == "Just"
        await parts.aclose()
        await asyncio.wait_for(servicer.cancelled.wait(), 10)


async def test_a_number_too_large_for_the_message_is_told() -> None:
    with pytest.raises(ClientError, match=r"--max-tokens 4294967296: Value out of range"):
        [part async for part in ask_grpc(Question("?", max_tokens=2**32), "127.0.0.1:1", None, stream=True)]


async def test_nobody_there_says_how_to_start() -> None:
    with pytest.raises(ClientError, match=r"nothing answers at 127.0.0.1:1 over gRPC; start a server with `make run`"):
        [part async for part in ask_grpc(QUESTION, "127.0.0.1:1", None, stream=True)]
