"""The gate before an ASGI application, and an ASGI answer to what is refused."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from dsde.access.gate import Gate
from dsde.engine.refusal import RequestRefused

__all__ = ["GateMiddleware", "refuse"]

_WITHOUT_KEY = ("/health", "/ping")
_POLICY_VIOLATION = 1008


class GateMiddleware:
    """Asks every request for its key but those about health, and the preflights of browsers, which carry none."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or _is_free(scope):
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        try:
            admission = self._gate.enter(_authorization(scope), client[0] if client else None)
        except RequestRefused as refused:
            await refuse(refused, scope, send)
            return
        with admission:
            await self._app(scope, receive, send)


def _is_free(scope: Scope) -> bool:
    if scope["type"] == "websocket":
        return False
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in _WITHOUT_KEY or scope["method"] == "OPTIONS"


def _authorization(scope: Scope) -> str | None:
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    # Two that differ could be read in two ways on their way here.
    return sent[0].decode("latin-1") if len(sent) == 1 else None


async def refuse(refused: RequestRefused, scope: Scope, send: Send, *, close: bool = False) -> None:
    """Answer as the OpenAI API does. close: end the connection, on which more of the request is still to come."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refused.message})
        return
    error: dict[str, Any] = {
        "message": refused.message,
        "type": HTTPStatus(refused.status).phrase,
        "param": refused.parameter,
        "code": refused.status,
    }
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(refused.retry_after_s))).encode()))
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
