"""The client against a real HTTP server, whose answers are made up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dsde.client.exchange import Answer, ClientError, Question
from dsde.client.http import ask_http

USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
TOP = {"id": "id", "model": "embedded"}
FIGURES = {"speculative_decoding": {"num_draft_tokens": 4}}


class Handler(BaseHTTPRequestHandler):
    seen: dict[str, Any] = {}  # noqa: RUF012 - the test's window on the last request

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.seen = {"path": self.path, "body": body, "key": self.headers.get("Authorization")}
        if body.get("vllm_xargs") == {"dsde_policy": "best"}:
            self._send(400, json.dumps({"error": {"message": "accepted: paper"}}))
        elif body["messages"][-1]["content"] == "Die":
            self._send(200, _events({"error": {"message": "engine away"}}))
        elif body["stream"]:
            pieces = [{"delta": {"content": "Just"}, "finish_reason": None}]
            pieces.append({"delta": {"content": " so"}, "finish_reason": "stop"})
            chunks = [{**TOP, "choices": [piece]} for piece in pieces]
            self._send(200, _events(*chunks, {**TOP, "choices": [], "usage": USAGE, "metrics": FIGURES}))
        else:
            choice = {"message": {"content": "Just so"}, "finish_reason": "stop"}
            self._send(200, json.dumps({**TOP, "choices": [choice], "usage": USAGE, "metrics": FIGURES}))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


def _events(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def asked(question: Question, url: str, stream: bool) -> list[str | Answer]:
    return [part async for part in ask_http(question, url, "secret", stream)]


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
async def test_the_question_arrives_whole(url: str, suffix: str) -> None:
    question = Question("Why?", system="Be brief.", max_tokens=5, temperature=0.0, policy="static")
    assert await asked(question, url + suffix, stream=False) == [
        "Just so",
        Answer("id", "embedded", "stop", 3, 2, {"num_draft_tokens": 4}),
    ]
    assert Handler.seen == {
        "path": "/v1/chat/completions",
        "key": "Bearer secret",
        "body": {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
            "stream": False,
            "max_completion_tokens": 5,
            "temperature": 0.0,
            "vllm_xargs": {"dsde_policy": "static"},
        },
    }


async def test_a_stream_comes_in_pieces(url: str) -> None:
    assert await asked(Question("Why?"), url, stream=True) == [
        "Just",
        " so",
        Answer("id", "embedded", "stop", 3, 2, {"num_draft_tokens": 4}),
    ]
    assert Handler.seen["body"]["stream_options"] == {"include_usage": True}


async def test_a_refusal_is_told(url: str) -> None:
    with pytest.raises(ClientError, match=r"answers 400: accepted: paper"):
        await asked(Question("?", policy="best"), url, stream=True)


async def test_an_error_inside_a_stream_is_told(url: str) -> None:
    with pytest.raises(ClientError, match="the server ended the answer: engine away"):
        await asked(Question("Die"), url, stream=True)


async def test_nobody_there_says_how_to_start() -> None:
    with pytest.raises(ClientError, match=r"nothing answers at http://127.0.0.1:1: .*; start a server with `make run`"):
        await asked(Question("?"), "http://127.0.0.1:1", stream=True)


async def test_a_url_that_is_none_says_what_is_accepted() -> None:
    with pytest.raises(ClientError, match=r"--url localhost:8000: .*; accepted: http://HOST:PORT"):
        await asked(Question("?"), "localhost:8000", stream=True)
