"""Turns the cancelling of a request into the disconnect that ASGI applications listen for."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["DisconnectOnCancel"]

_END_S = 5.0
_DISCONNECT: Message = {"type": "http.disconnect"}


class DisconnectOnCancel:
    """ASGI middleware for a server that cancels the application's task when a client goes.

    vLLM answers in a task of its own, which ends at a disconnect; where the task that waits for it is cancelled
    instead, it would go on to the last token, for nobody. Here the application is never cancelled: it hears of a
    disconnect, whatever it waits for then, and is ended only if that has not made it end in 5 s.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone = asyncio.Event()

        async def hear() -> Message:
            if gone.is_set():
                return _DISCONNECT
            message, left = asyncio.ensure_future(receive()), asyncio.ensure_future(gone.wait())
            try:
                await asyncio.wait((message, left), return_when=asyncio.FIRST_COMPLETED)
                return _DISCONNECT if gone.is_set() else message.result()
            finally:
                for one in (message, left):
                    one.cancel()
                # Its error, if any, has no other reader.
                if message.done() and not message.cancelled():
                    message.exception()

        async def say(message: Message) -> None:
            if not gone.is_set():
                await send(message)

        answering = asyncio.ensure_future(self._app(scope, hear, say))
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            gone.set()
            try:
                await asyncio.wait((answering,), timeout=_END_S)
            finally:
                answering.cancel()
            raise
