"""What a stream is counted as, and a server that cuts, refuses and repeats."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dsde.chaos.stream import Stream, over_grpc, over_http
from dsde.chaos.traffic import Traffic, Verdict, fault_of

EXPECTED = ([1, 2, 3], "one two three")


def stream(ids: list[int], text: str = "one two three", **told: Any) -> Stream:
    return Stream("p", {}, None, text, ids, **{"usage": (4, len(ids)), "ended": True, **told})


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        (stream([1, 2, 3]), None),
        (stream([1, 2, 4]), "wrong"),
        (stream([1, 2, 3], "one two three?"), "wrong"),
        (stream([1, 2]), "wrong"),
        (stream([1, 2, 3], usage=None), "wrong"),
        (stream([1, 2, 3], usage=(4, 4)), "wrong"),
        (stream([1, 2, 2, 3], usage=(4, 3)), "duplicated"),
        (stream([1, 2, 2], usage=(4, 2)), "duplicated"),
        (stream([1, 2], usage=None, ended=False), "lost"),
        (stream([], "", usage=None, ended=False), "lost"),
        (stream([1, 2], usage=None, ended=False, error="503: died"), "errors_explicit"),
        (stream([2], usage=None, ended=False, error="503: died"), "wrong"),
    ],
)
def test_a_stream_is_counted_as_what_became_of_it(told: Stream, fault: str | None) -> None:
    assert fault_of(told, 3, EXPECTED) == fault


def test_a_sampled_answer_may_be_any_of_its_length() -> None:
    assert fault_of(stream([7, 7, 7]), 3, None) is None
    assert fault_of(stream([7, 7]), 3, None) == "wrong"
    assert fault_of(stream([7, 7, 7, 7]), 3, None) == "duplicated"


def test_a_verdict_holds_with_explicit_errors_only() -> None:
    assert Verdict(requests=9, errors_explicit=3, resumed=2).holds
    for name in ("lost", "duplicated", "wrong"):
        assert not Verdict(requests=9, **{name: 1}).holds


def event(ids: list[int], text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "token_ids": ids}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}\n\n'
ANSWERS = {
    "whole": event([1], "a") + event([2], "b") + USAGE + b"data: [DONE]\n\n",
    "silent": event([1], "a"),
    "error": event([1], "a") + b'data: {"error": {"code": 503, "message": "died"}}\n\ndata: [DONE]\n\n',
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        status = 503 if name == "full" else 200
        body = ANSWERS.get(name, b'{"error": {"message": "full"}}')
        self.send_response(status)
        # A cut answer is shorter than it says.
        self.send_header("Content-Length", str(len(ANSWERS["whole"]) if name == "cut" else len(body)))
        self.end_headers()
        self.wfile.write(ANSWERS["silent"] if name == "cut" else body)
        self.close_connection = True

    def log_message(self, *words: Any) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "ids", "error", "ended"),
    [
        ("whole", [1, 2], None, True),
        ("silent", [1], None, False),
        ("cut", [1], None, False),
        ("error", [1], "503: died", False),
        ("full", [], "503: full", False),
    ],
)
def test_an_end_an_error_and_a_cut_are_told_apart(
    url: str, name: str, ids: list[int], error: str | None, ended: bool
) -> None:
    one = Stream(name)
    over_http(url, one)
    assert (one.ids, one.error, one.ended) == (ids, error, ended)


def test_a_grpc_status_is_an_error() -> None:
    one = Stream("p")
    over_grpc("127.0.0.1:1", one)
    assert (one.error or "").startswith("UNAVAILABLE: ")
    assert not one.ended


def test_without_answers_to_compare_with_nothing_starts() -> None:
    with (
        pytest.raises(ValueError, match=r"--url http://127.0.0.1:1/v1: no answer; accepted: where"),
        Traffic("http://127.0.0.1:1/v1", "127.0.0.1:1", 2, 0),
    ):
        pass
