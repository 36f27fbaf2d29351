"""The methods of dsde.v1.Inference and grpc.health.v1.Health, under the names by which Serve's proxy calls them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote

from grpc_health.v1 import health_pb2

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.rpc.answer import Answer
from deployments.rpc.request import field_at_fault, openai_body
from deployments.rpc.status import Context, set_status
from dsde.access.gate import Admission, Gate
from dsde.access.queue import FULL, RETRY_AFTER_S
from dsde.engine.refusal import RequestRefused

if TYPE_CHECKING:
    from dsde.engine.generation import TextGeneration

__all__ = ["InferenceService"]

logger = logging.getLogger("ray.serve")

_SERVICES = ("", pb.DESCRIPTOR.services_by_name["Inference"].full_name)
_WATCH_PERIOD_S = 5.0
_WATCHES = 12
_Serving = health_pb2.HealthCheckResponse


class InferenceService:
    """Mixed into a deployment, which calls offer() before the first call arrives."""

    def offer(
        self, generation: TextGeneration, gate: Gate, max_length: int, is_full: Callable[[], bool] = lambda: False
    ) -> None:
        """Serve `generation` behind `gate`.

        max_length: longest speculation length in draft tokens. is_full: whether no more may wait for an engine.
        """
        self._generation = generation
        self._gate, self._is_full = gate, is_full
        self._max_length = max_length

    async def Generate(self, request: pb.GenerateRequest, grpc_context: Context) -> pb.GenerateResponse:
        """The whole answer."""
        answer = pb.GenerateResponse()
        async with aclosing(self._messages(request, grpc_context, stream=False)) as messages:
            async for message in messages:
                answer = message
        return answer

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The answer as it comes."""
        async with aclosing(self._messages(request, grpc_context, stream=True)) as messages:
            async for message in messages:
                yield message

    async def GetModel(self, request: pb.GetModelRequest, grpc_context: Context) -> pb.GetModelResponse:
        """What is served."""
        from dsde.engine.options import choosable_policies

        try:
            with self._enter(grpc_context):
                return pb.GetModelResponse(
                    name=self._generation.model_name,
                    max_model_len=self._generation.max_model_len,
                    vocab_size=self._generation.vocab_size,
                    max_speculation_length=self._max_length,
                    policies=choosable_policies(self._max_length),
                )
        except RequestRefused as refused:
            set_status(grpc_context, refused.status, refused.message, retry_after_s=refused.retry_after_s)
            return pb.GetModelResponse()

    async def _messages(
        self, request: pb.GenerateRequest, context: Context, stream: bool
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The messages of an answer; one that fails ends in an empty message, which carries its status."""
        try:
            with self._enter(context):
                if self._is_full():
                    raise RequestRefused(HTTPStatus.TOO_MANY_REQUESTS, FULL, retry_after_s=RETRY_AFTER_S)
                generation = await self._generation.start(openai_body(request, stream), _headers(context))
                top = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
                answer = Answer(generation.request_id, self._generation.model_name, generation.num_prompt_tokens, top)
                async with aclosing(generation.outputs) as outputs:
                    async for output in outputs:
                        message = answer.message(output)
                        if message is not None:
                            yield message
        except RequestRefused as refused:
            if refused.status == 500:
                logger.error("gRPC request %s failed", request.request_id or "without id", exc_info=refused.__cause__)
            field, text = field_at_fault(request, refused) if refused.status in (400, 422) else (None, refused.message)
            set_status(context, refused.status, text, field, refused.retry_after_s)
            yield pb.GenerateResponse()
        except Exception:
            logger.exception("gRPC request %s failed", request.request_id or "without id")
            set_status(context, 500, "internal error; the server's log says more")
            yield pb.GenerateResponse()

    def _enter(self, context: Context) -> Admission:
        metadata = context.invocation_metadata()
        sent = [value for name, value in metadata if name == "authorization"]
        # ipv4:127.0.0.1:50000 or ipv6:[::1]:50000, the brackets in per cent signs.
        peer = unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]")
        # Who is behind a proxy on this machine is not on it; over HTTP uvicorn has seen to that.
        forwarded = [value for name, value in metadata if name == "x-forwarded-for"]
        if forwarded:
            peer = forwarded[-1].rpartition(",")[2].strip()
        return self._gate.enter(sent[0] if len(sent) == 1 else None, peer)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        """SERVING while an engine can answer."""
        if request.service not in _SERVICES:
            set_status(grpc_context, 404, f"service = {request.service!r}: accepted: '' or {_SERVICES[1]}")
            return _Serving()
        return _Serving(status=await self._status())

    async def List(self, request: health_pb2.HealthListRequest, grpc_context: Context) -> health_pb2.HealthListResponse:
        """The status of each service."""
        status = _Serving(status=await self._status())
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(_SERVICES, status))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The status now and at each change, seen within seconds; SERVICE_UNKNOWN for a name that is never served.

        Ends after a minute, as UNAVAILABLE, on which clients watch again: a server that stops waits for its calls.
        """
        said = None
        for _ in range(_WATCHES):
            known = request.service in _SERVICES
            status = await self._status() if known else _Serving.SERVICE_UNKNOWN
            if status != said:
                said = status
                yield _Serving(status=status)
            await asyncio.sleep(_WATCH_PERIOD_S)
        set_status(grpc_context, 503, f"watched for {_WATCHES * _WATCH_PERIOD_S:.0f} s; watch again")
        yield _Serving(status=status)

    async def _status(self) -> int:
        return int(_Serving.SERVING if await self._generation.healthy() else _Serving.NOT_SERVING)


def _headers(context: Context) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
