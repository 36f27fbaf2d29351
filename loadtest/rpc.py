"""Requests over gRPC: dsde.v1.Inference GenerateStream."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from dsde.client.rpc import answer
from loadtest.exchange import End, Failure, Request

__all__ = ["GrpcSender"]

_MODEL_TIMEOUT_S = 30.0


class GrpcSender:
    """address: host and port; one channel carries all requests. Made inside the event loop that uses it."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.address = address
        # An environment's proxy has no business with loopback.
        here = address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
        self._channel = grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", int(not here)),))
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None

    async def send(self, request: Request, timeout_s: float) -> AsyncGenerator[int | End, None]:
        """See exchange.Sender."""
        try:
            call = self._stub.GenerateStream(_message(request), timeout=timeout_s, metadata=self._metadata)
        except (ValueError, TypeError, AttributeError) as error:
            raise Failure("request", str(error)) from None
        ended = False
        try:
            async for message in call:
                if message.token_ids:
                    yield len(message.token_ids)
                if message.HasField("usage"):
                    ended = True
                    yield _end(message)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Failure("timeout", f"no end within {timeout_s:g} s") from None
            raise Failure(f"grpc {error.code().name}", error.details() or "without a reason") from None
        finally:
            call.cancel()
        if not ended:
            raise Failure("cut", "the stream ended before its usage")

    async def model(self) -> tuple[str, str]:
        """See exchange.Sender."""
        try:
            model = await self._stub.GetModel(pb.GetModelRequest(), timeout=_MODEL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                text = f"nothing answers at {self.address} over gRPC: {details}; start a server with `make run`"
                raise Failure("connection", text) from None
            raise Failure(f"grpc {error.code().name}", f"{self.address}: {details}") from None
        return model.name, ""

    async def close(self) -> None:
        """See exchange.Sender."""
        await self._channel.close()


def _message(request: Request) -> pb.GenerateRequest:
    prompt = request.prompt
    sampling = pb.SamplingParams(max_tokens=prompt.output_tokens, ignore_eos=request.ignore_eos or None)
    for name, value in prompt.sampling.items():
        setattr(sampling, name, int(value) if name in ("seed", "top_k", "min_tokens") else value)
    message = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(**one) for one in prompt.messages]),
        sampling=sampling,
        request_id=request.request_id,
    )
    if request.policy:
        message.speculation.policy = request.policy
    return message


def _end(message: pb.GenerateResponse) -> End:
    told = answer(message)
    return End(
        answer_id=told.request_id,
        finish_reason=told.finish_reason,
        prompt_tokens=told.prompt_tokens,
        completion_tokens=told.completion_tokens,
        speculation=told.speculation,
    )
