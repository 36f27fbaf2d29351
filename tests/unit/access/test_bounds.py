from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dsde.access.bounds import Bounds
from dsde.config import LimitsConfig

MIB = 2**20


class Server:
    """The bounds before an application that answers 200 with the length of the body it has read."""

    def __init__(self, **limits: Any) -> None:
        self._bounds = Bounds(self._app, LimitsConfig(message_mib=1, header_kib=1, **limits))
        self.taken = 0

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = str(len(message["body"])).encode()
        assert message["more_body"] is False
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
        assert (await receive())["type"] == "http.disconnect"

    async def ask(self, *parts: bytes, headers: Any = (), end: bool = True, **scope: Any) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        more = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        more += [{"type": "http.request", "more_body": False}, {"type": "http.disconnect"}] if end else []

        async def receive() -> Any:
            if not more:
                await asyncio.Event().wait()
            self.taken += 1
            return more.pop(0)

        async def send(message: Any) -> None:
            said.append(message)

        await self._bounds({"type": "http", "headers": list(headers), **scope}, receive, send)
        return said


def refused(said: list[dict[str, Any]]) -> tuple[int, str]:
    start, body = said
    assert dict(start["headers"])[b"connection"] == b"close"
    return start["status"], json.loads(body["body"])["error"]["message"]


async def test_a_body_up_to_the_limit_arrives_whole() -> None:
    server = Server()
    for parts in ([], [b"x"], [b"x" * (MIB // 2)] * 2):
        _, body = await server.ask(*parts)
        assert int(body["body"]) == sum(map(len, parts))


async def test_a_body_over_the_limit_is_not_read_on() -> None:
    server = Server()
    told = refused(await server.ask(*[b"x" * (MIB // 2)] * 100))
    assert told == (413, "the body is too large; accepted: limits.message_mib = 1 MiB")
    assert server.taken == 3


async def test_a_body_that_says_its_length_is_not_read_at_all() -> None:
    server = Server()
    assert refused(await server.ask(b"x", headers=[(b"content-length", str(MIB + 1).encode())]))[0] == 413
    assert server.taken == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"headers": [(b"x-long", b"x" * 1020)]},
        {"headers": [(b"a", b"b")] * 300},
        {"raw_path": b"/" + b"x" * 1024},
        {"query_string": b"x" * 1025},
    ],
)
async def test_a_header_over_the_limit_is_refused(asked: Any) -> None:
    told = refused(await Server().ask(**asked))
    assert told == (431, "the header is too large; accepted: limits.header_kib = 1 KiB")
    _, body = await Server().ask(headers=[(b"x-short", b"x" * 900)])
    assert body["body"] == b"0"


async def test_a_body_that_does_not_end_is_not_waited_for() -> None:
    told = refused(await Server(body_s=0.05).ask(b"x", end=False))
    assert told == (408, "the body took too long; accepted: limits.body_s = 0.05 s")


async def test_a_client_that_leaves_is_not_answered() -> None:
    said: list[Any] = []
    middleware = Bounds(Server()._app, LimitsConfig())

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        said.append(message)

    await middleware({"type": "http", "headers": []}, receive, send)
    assert said == []
