"""Servers of both protocols whose answers are made up, and records to sum up."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from loadtest.exchange import Request
from loadtest.records import Record
from loadtest.workload import Prompt

FIGURES: dict[str, Any] = {
    "num_draft_tokens": 8,
    "num_accepted_draft_tokens": 4,
    "num_spec_steps": 2,
    "dsde": {
        "policy": "paper",
        "steps": 4,
        "steps_off": 2,
        "speculation_length": {"mean": 2.0, "max": 4, "limit": 8},
        "kld": {"mean": 0.25, "last": 0.5, "max": 0.5},
        "stability": 0.75,
        "straggler": {"wait_ms": 12.0, "caused_ms": 3.0, "steps": 1},
    },
}


def request(
    content: str = "Why?", protocol: str = "http", at_s: float = 0.0, name: str = "load-0", **more: Any
) -> Request:
    prompt = Prompt("chat", [{"role": "user", "content": content}], 9, {"temperature": 0.5, "seed": 3})
    return Request(name, prompt, protocol, at_s, **more)


@pytest.fixture
def record() -> Callable[..., Record]:
    """A complete record, changed as asked: 1 s to the first token, 9 tokens in 2 s."""

    def make(**changed: Any) -> Record:
        whole: dict[str, Any] = {
            "request_id": "load-0",
            "answer_id": "chatcmpl-load-0",
            "workload": "chat",
            "protocol": "http",
            "scheduled_s": 0.0,
            "started_s": 0.0,
            "first_token_s": 1.0,
            "end_s": 3.0,
            "prompt_tokens": 5,
            "completion_tokens": 9,
            "finish_reason": "length",
            "gaps_ms": [400.0, 1600.0],
            "speculation": FIGURES,
        }
        return Record(**{**whole, **changed})

    return make


class Handler(BaseHTTPRequestHandler):
    seen: list[dict[str, Any]] = []  # noqa: RUF012 - the tests' window on the requests
    release = threading.Event()

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "embedded", "root": "/models/target"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.seen.append({"body": body, "id": self.headers["X-Request-Id"], "key": self.headers["Authorization"]})
        content = body["messages"][-1]["content"]
        top = {"id": f"chatcmpl-{self.headers['X-Request-Id']}", "model": "embedded"}
        if content == "Full":
            self._send(503, json.dumps({"error": {"message": "queue is full"}}))
            return
        if content == "Hang":
            Handler.release.wait(30)
            return
        pieces = [("", 0, None), ("Just", 1, None), (" so", 4, None), ("", 5, "length")]
        events: list[dict[str, Any]] = [
            {
                **top,
                "choices": [{"delta": {"content": text}, "finish_reason": reason}],
                "usage": {"prompt_tokens": 3, "completion_tokens": tokens},
            }
            for text, tokens, reason in pieces
        ]
        if content == "Plain":
            for event in events:
                del event["usage"]
        usage = {"prompt_tokens": 3, "completion_tokens": 5}
        events.append({**top, "choices": [], "usage": usage, "metrics": {"speculative_decoding": FIGURES}})
        if content == "Bare":
            del events[-1]["metrics"]
        if content == "Die":
            events[3:] = [{"error": {"message": "engine away"}}]
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self._send(200, lines if content == "Cut" else lines + "data: [DONE]\n\n")

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.seen = []
    Handler.release.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Handler.release.set()
        server.shutdown()


class Servicer(pb_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.seen: list[pb.GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(name="embedded")

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.seen.append(request)
        content = request.chat.messages[-1].content
        if content == "Full":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
        if content == "Hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        top = {"request_id": request.request_id, "model": "embedded"}
        yield pb.GenerateResponse(**top, text="Just", token_ids=[5])
        yield pb.GenerateResponse(**top, text=" so", token_ids=[6, 7, 8])
        if content == "Cut":
            return
        last = pb.GenerateResponse(**top, token_ids=[9], finish_reason=pb.FINISH_REASON_LENGTH)
        last.usage.prompt_tokens, last.usage.completion_tokens = 3, 5
        ParseDict(FIGURES, last.speculation)
        yield last


@pytest.fixture
async def rpc() -> AsyncIterator[tuple[str, Servicer]]:
    servicer, server = Servicer(), grpc.aio.server()
    pb_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", servicer
    await server.stop(None)
