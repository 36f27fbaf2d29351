"""One answer as it streams, over HTTP or gRPC, in one form, so that two of them can be compared."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from google.protobuf.json_format import MessageToDict

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from dsde.client.http import reason

__all__ = ["TIMEOUT_S", "Stream", "over_grpc", "over_http"]

TIMEOUT_S = 240.0


@dataclass(slots=True)
class Stream:
    """What has come of one answer, while it comes and afterwards.

    options: sampling parameters by the names that both protocols share, and for HTTP any other field of the body.
    policy: a speculation policy of its own. usage: (prompt tokens, completion tokens). metrics: the answer's `metrics`.
    error: what the server said instead of an end, its status first. ended: the answer came to its end. A stream with
    neither was cut.
    """

    prompt: str
    options: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    metrics: dict[str, Any] | None = None
    error: str | None = None
    ended: bool = False

    @property
    def resumed(self) -> bool:
        """Whether it says that another engine went on with it."""
        return self.metrics is not None and "resumed" in (self.metrics["speculative_decoding"] or {}).get("dsde", {})


def over_http(url: str, stream: Stream, api_key: str | None = None) -> None:
    """Fill `stream` from /completions below `url`, which ends in /v1."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = {
        "prompt": stream.prompt,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        **({"vllm_xargs": {"dsde_policy": stream.policy}} if stream.policy else {}),
        **stream.options,
    }
    try:
        with (
            httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers) as web,
            web.stream("POST", f"{url}/completions", json=body) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                stream.error = f"{answer.status_code}: {reason(answer.read())}"
                return
            for line in answer.iter_lines():
                _take_line(stream, line)
    except (httpx.TransportError, json.JSONDecodeError):
        # Neither an end nor an error, perhaps amid a line.
        return


def _take_line(stream: Stream, line: str) -> None:
    if line == "data: [DONE]":
        stream.ended = stream.error is None
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        stream.error = f"{event['error']['code']}: {event['error']['message']}"
        return
    for choice in event["choices"]:
        stream.text += choice["text"]
        stream.ids += choice["token_ids"] or []
    if event.get("usage"):
        stream.usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        stream.metrics = event.get("metrics")


def over_grpc(address: str, stream: Stream, api_key: str | None = None) -> None:
    """Fill `stream` from GenerateStream at `address`."""
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
    request = pb.GenerateRequest(prompt=stream.prompt, sampling=pb.SamplingParams(**stream.options))
    if stream.policy:
        request.speculation.policy = stream.policy
    try:
        with grpc.insecure_channel(address, (("grpc.enable_http_proxy", 0),)) as channel:
            inference = pb_grpc.InferenceStub(channel)
            for message in inference.GenerateStream(request, timeout=TIMEOUT_S, metadata=metadata):
                stream.text += message.text
                stream.ids += message.token_ids
                if message.HasField("usage"):
                    stream.usage = (message.usage.prompt_tokens, message.usage.completion_tokens)
                    stream.metrics = {"speculative_decoding": _figures(message)}
                    stream.ended = True
    except grpc.RpcError as error:
        # A client's own deadline is no word of the server's.
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            stream.error = f"{error.code().name}: {error.details()}"


def _figures(message: pb.GenerateResponse) -> dict[str, Any]:
    return dict(
        MessageToDict(message.speculation, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )
