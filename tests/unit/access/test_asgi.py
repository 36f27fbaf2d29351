from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsde.access.asgi import GateMiddleware
from dsde.access.gate import Gate
from dsde.access.keyring import Keyring
from dsde.access.keys import new_key, write_keys
from dsde.config import LimitsConfig
from tests.unit.access.conftest import NOW


class Door:
    """The middleware before an application that answers 200 with nothing."""

    def __init__(self, file: Path) -> None:
        key, self.sent = new_key("alice", NOW, requests_per_minute=3)
        write_keys(file, [key])
        self.reached: list[str] = []
        self._middleware = GateMiddleware(self._app, Gate(Keyring(file), LimitsConfig(), 1))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, path: str, *authorizations: str, method: str = "GET", **scope: Any) -> list[dict[str, Any]]:
        headers = [(b"authorization", one.encode("latin-1")) for one in authorizations]
        said: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            said.append(message)

        asked = {"type": "http", "path": path, "method": method, "headers": headers, "client": ("10.0.0.7", 5)}
        await self._middleware({**asked, **scope}, None, send)  # type: ignore[arg-type]
        return said


@pytest.fixture
def door(file: Path) -> Door:
    return Door(file)


async def test_a_key_opens_and_no_key_is_told_what_is_asked_for(door: Door) -> None:
    start, _ = await door.ask("/v1/models", f"Bearer {door.sent}")
    assert start["status"] == 200
    start, body = await door.ask("/v1/models")
    headers = dict(start["headers"])
    assert (start["status"], headers[b"www-authenticate"]) == (401, b"Bearer")
    assert int(headers[b"content-length"]) == len(body["body"])
    assert json.loads(body["body"])["error"] == {
        "message": "authorization: accepted is 'Bearer ' and an API key of this server",
        "type": "Unauthorized",
        "param": None,
        "code": 401,
    }
    assert door.reached == ["/v1/models"]


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/metrics", "/metrics/", "/v1/models", "/invocations", "/tokenize", "/docs", "/ping/x"),
        *("/health/", "//health", "/healthz", "/v1/../health", "/health%20", "/HEALTH"),
    ],
)
async def test_every_path_but_health_is_closed(door: Door, path: str) -> None:
    start, _ = await door.ask(path)
    assert start["status"] == 401
    assert door.reached == []


async def test_health_and_preflights_are_open(door: Door) -> None:
    for path, method in (("/health", "GET"), ("/ping", "GET"), ("/v1/chat/completions", "OPTIONS")):
        start, _ = await door.ask(path, method=method)
        assert start["status"] == 200
    start, _ = await door.ask("/base/health", root_path="/base")
    assert start["status"] == 200


async def test_two_keys_are_none(door: Door) -> None:
    start, _ = await door.ask("/v1/models", f"Bearer {door.sent}", f"Bearer {door.sent}")
    assert start["status"] == 401


async def test_a_spent_minute_says_when_to_come_back(door: Door) -> None:
    for _ in range(3):
        await door.ask("/v1/models", f"Bearer {door.sent}")
    start, body = await door.ask("/v1/models", f"Bearer {door.sent}")
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (429, b"20")
    assert door.sent not in body["body"].decode()


async def test_a_websocket_asks_for_a_key_too(door: Door) -> None:
    (closed,) = await door.ask("/health", type="websocket")
    assert (closed["type"], closed["code"]) == ("websocket.close", 1008)
    assert door.reached == []


async def test_a_lifespan_passes(door: Door) -> None:
    await door.ask("lifespan", type="lifespan")
    assert door.reached == ["lifespan"]
