"""A stream that breaks off in Serve's proxy ends in an error that says so."""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["GONE", "StreamEnd", "gone"]

GONE = "the ingress of this request went away; send it again"


class StreamEnd:
    """ASGI middleware for Serve's proxy, which leaves off where an ingress dies amid an answer.

    A stream of server-sent events gets one more, of the form of all errors of the OpenAI API. Any other answer stays
    cut, which its length tells a client.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_stream = False

        async def tell(message: Message) -> None:
            nonlocal open_stream
            if message["type"] == "http.response.start":
                kind = Headers(raw=[(name, value) for name, value in message["headers"]]).get("content-type", "")
                open_stream = kind.startswith("text/event-stream")
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                open_stream = False
            await send(message)

        await self._app(scope, receive, tell)
        if open_stream:
            event = f"data: {json.dumps(gone())}\n\n".encode()
            await send({"type": "http.response.body", "body": event})


def gone() -> dict[str, object]:
    """What a client is told whose ingress died."""
    code = HTTPStatus.SERVICE_UNAVAILABLE
    return {"error": {"message": GONE, "type": code.phrase, "param": None, "code": code.value}}
