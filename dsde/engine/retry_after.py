"""`Retry-After` on every refusal that a client may repeat: 429 and 503."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RETRY_AFTER_S", "RetryAfter"]

RETRY_AFTER_S = 1
"""A full queue moves within a second; a replica that is missing takes longer, and other replicas answer meanwhile."""
_REFUSED = (429, 503)


class RetryAfter:
    """ASGI middleware that adds the header where the application has not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in _REFUSED:
                MutableHeaders(scope=message).setdefault("retry-after", str(RETRY_AFTER_S))
            await send(message)

        await self._app(scope, receive, told)
