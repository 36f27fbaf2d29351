"""Answers of the running application as they stream, over HTTP and over gRPC."""

from __future__ import annotations

from typing import Any

from dsde.chaos import stream as streaming
from dsde.chaos.stream import Stream
from tests.serve.conftest import Served

TIMEOUT_S = streaming.TIMEOUT_S
TOKENS = 96


def ask(prompt: str, **options: Any) -> Stream:
    """One to be filled: of 96 tokens and with drafts in every step, unless the options say otherwise."""
    return Stream(prompt, {"max_tokens": TOKENS, "ignore_eos": True, **options}, policy="static")


def answer(stream: Stream) -> tuple[str, list[int], tuple[int, int] | None]:
    """What must be the same whatever happened meanwhile."""
    return stream.text, stream.ids, stream.usage


def over_http(served: Served, stream: Stream) -> None:
    streaming.over_http(served.url, stream, served.key)


def over_grpc(served: Served, stream: Stream) -> None:
    streaming.over_grpc(served.address, stream, served.key)


WAYS = (over_http, over_grpc)
