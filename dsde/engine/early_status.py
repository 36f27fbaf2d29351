"""A refusal's status, where a streaming answer would have said 200 already, and when the request may come again."""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsde.access.queue import RETRY_AFTER_S

__all__ = ["EarlyStatus"]

_REPEATABLE = (429, 503)
_ERROR_EVENT = b'data: {"error":'


class EarlyStatus:
    """ASGI middleware that sends no status before the first part of the body.

    A stream whose first event is an error becomes that error, with its status. 429 and 503 get a `Retry-After`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: Message | None = None
        refused = False

        async def tell(message: Message) -> None:
            nonlocal held, refused
            if message["type"] == "http.response.start":
                held = message
                return
            if refused:
                return
            if held is not None:
                start, held = held, None
                error = _error(message)
                if error is not None:
                    refused = True
                    body = json.dumps(error).encode()
                    start = {**start, "status": int(error["error"]["code"]), "headers": _headers(body)}
                    message = {"type": "http.response.body", "body": body}
                if start["status"] in _REPEATABLE:
                    MutableHeaders(scope=start).setdefault("retry-after", str(RETRY_AFTER_S))
                await send(start)
            await send(message)

        await self._app(scope, receive, tell if scope["type"] == "http" else send)


def _error(message: Message) -> dict[str, Any] | None:
    """The OpenAI error that this part of a stream consists of, if it does."""
    body = message.get("body", b"")
    if not body.startswith(_ERROR_EVENT):
        return None
    found: dict[str, Any] = json.loads(body.split(b"\n", 1)[0].removeprefix(b"data: "))
    return found if found["error"].get("code") else None


def _headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
