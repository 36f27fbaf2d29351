"""The question over gRPC, to dsde.v1.Inference."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from dsde.client.exchange import Answer, ClientError, Question

__all__ = ["answer", "ask_grpc"]


async def ask_grpc(
    question: Question, address: str, api_key: str | None, stream: bool
) -> AsyncGenerator[str | Answer, None]:
    """See exchange.Ask. address: host and port."""
    # An environment's proxy has no business with loopback.
    here = address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
    try:
        request = _request(question)
    except ValueError as error:
        raise ClientError(f"--max-tokens {question.max_tokens}: {error}") from None
    try:
        async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", int(not here)),)) as channel:
            stub = pb_grpc.InferenceStub(channel)
            method = stub.GenerateStream if stream else stub.Generate
            call = method(request, metadata=metadata)
            async for message in call if stream else _one(call):
                yield message.text
                if message.HasField("usage"):
                    yield answer(message)
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE and ("connect" in details or "resolving" in details):
            raise ClientError(f"nothing answers at {address} over gRPC; start a server with `make run`") from None
        raise ClientError(f"{address} answers {error.code().name}: {details}") from None


async def _one(call: Any) -> AsyncIterable[pb.GenerateResponse]:
    yield await call


def _request(question: Question) -> pb.GenerateRequest:
    request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(**one) for one in question.messages]))
    if question.max_tokens is not None:
        request.sampling.max_tokens = question.max_tokens
    if question.temperature is not None:
        request.sampling.temperature = question.temperature
    if question.policy is not None:
        request.speculation.policy = question.policy
    return request


def answer(message: pb.GenerateResponse) -> Answer:
    """What the last message of an answer says; no speculation where it has none."""
    stats = MessageToDict(
        message.speculation, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return Answer(
        request_id=message.request_id,
        model=message.model,
        finish_reason=pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower(),
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        speculation=stats if message.HasField("speculation") else None,
    )
