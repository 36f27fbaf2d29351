"""Refuses a request for an answer while the queue is full, before anything is spent on it."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from dsde.access.asgi import refuse
from dsde.engine.refusal import RequestRefused

__all__ = ["FULL", "RETRY_AFTER_S", "QueueBound"]

FULL = "every engine replica is full; send the request again later"
RETRY_AFTER_S = 1
"""A full queue moves within a second; a replica that is missing takes longer, and other replicas answer meanwhile."""
_ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class QueueBound:
    """ASGI middleware. is_full: whether as many requests wait for an engine as may."""

    def __init__(self, app: ASGIApp, is_full: Callable[[], bool]) -> None:
        self._app, self._is_full = app, is_full

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] == "POST"
        if asks and self._is_full() and scope["path"].removeprefix(scope.get("root_path", "")) in _ANSWERING:
            refused = RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, FULL, retry_after_s=RETRY_AFTER_S)
            await refuse(refused, scope, send)
            return
        await self._app(scope, receive, send)
