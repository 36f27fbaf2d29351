"""Answers as they stream, over HTTP and over gRPC, in one form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from google.protobuf.json_format import MessageToDict

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.serve.conftest import Served

TIMEOUT_S = 240
TOKENS = 96


@dataclass
class Stream:
    """What has come of one answer, over either protocol."""

    prompt: str
    options: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    metrics: dict[str, Any] | None = None
    error: str | None = None

    def answer(self) -> tuple[str, list[int], tuple[int, int] | None]:
        return self.text, self.ids, self.usage

    @property
    def resumed(self) -> bool:
        return self.metrics is not None and "resumed" in self.metrics["speculative_decoding"]["dsde"]


def over_http(served: Served, stream: Stream) -> None:
    body = {
        "model": served.model,
        "prompt": stream.prompt,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"dsde_policy": "static"},
        **stream.options,
    }
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as web,
        web.stream("POST", f"{served.url}/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if _take_line(stream, line)]
    assert lines[-1] == "data: [DONE]"


def _take_line(stream: Stream, line: str) -> bool:
    if not line.startswith("data: {"):
        return bool(line)
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        stream.error = event["error"]["message"]
        return True
    for choice in event["choices"]:
        stream.text += choice["text"]
        stream.ids += choice["token_ids"] or []
    if event.get("usage"):
        stream.usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        stream.metrics = event["metrics"]
    return True


def over_grpc(served: Served, stream: Stream) -> None:
    sampling = pb.SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **stream.options})
    request = pb.GenerateRequest(
        prompt=stream.prompt, sampling=sampling, speculation=pb.SpeculationOptions(policy="static")
    )
    with grpc.insecure_channel(served.address, (("grpc.enable_http_proxy", 0),)) as channel:
        for message in pb_grpc.InferenceStub(channel).GenerateStream(request, timeout=TIMEOUT_S):
            stream.text += message.text
            stream.ids += message.token_ids
    stream.usage = (message.usage.prompt_tokens, message.usage.completion_tokens)
    told = MessageToDict(
        message.speculation, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    stream.metrics = {"speculative_decoding": told}


WAYS = (over_http, over_grpc)
