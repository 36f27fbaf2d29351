from __future__ import annotations

import json
from typing import Any

import pytest

from dsde.access.queue import FULL, QueueBound


async def ask(full: bool, path: str, method: str = "POST") -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"reached": scope["path"]})

    async def send(message: Any) -> None:
        said.append(message)

    await QueueBound(app, lambda: full)({"type": "http", "path": path, "method": method}, None, send)  # type: ignore[arg-type]
    return said


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_a_full_queue_refuses_before_the_body_is_looked_at(path: str) -> None:
    start, body = await ask(True, path)
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (503, b"1")
    assert json.loads(body["body"])["error"]["message"] == FULL
    assert await ask(False, path) == [{"reached": path}]


@pytest.mark.parametrize(("path", "method"), [("/v1/models", "GET"), ("/health", "GET"), ("/tokenize", "POST")])
async def test_what_needs_no_engine_is_answered_all_the_same(path: str, method: str) -> None:
    assert await ask(True, path, method) == [{"reached": path}]
