"""Turns the cancelling of a request into the disconnect that ASGI applications listen for; ends what it asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakSet

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["DisconnectOnCancel", "closed_with_request"]

T = TypeVar("T")

_END_S = 5.0
_DISCONNECT: Message = {"type": "http.disconnect"}
_streams: ContextVar[WeakSet[AsyncGenerator[Any, None]] | None] = ContextVar("dsde_streams", default=None)


def closed_with_request(stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The stream itself, which is closed at the latest when the HTTP request that it was made for has ended.

    An application may drop a stream unfinished and unclosed, and a traceback may keep it alive for long.
    """
    streams = _streams.get()
    if streams is not None:
        streams.add(stream)
    return stream


class DisconnectOnCancel:
    """ASGI middleware for a server that cancels the application's task when a client goes.

    vLLM answers in a task of its own, which ends at a disconnect; where the task that waits for it is cancelled
    instead, it would go on to the last token, for nobody. Here the application is never cancelled: it hears of a
    disconnect, whatever it waits for then, and is ended only if that has not made it end in 5 s. A server that can no
    longer hear the client, for whatever reason, is taken for a disconnect too.
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
            # An error of one that nobody waits for any more has no other reader.
            message.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                await asyncio.wait((message, left), return_when=asyncio.FIRST_COMPLETED)
                heard = message.done() and not message.cancelled() and message.exception() is None
                return message.result() if heard and not gone.is_set() else _DISCONNECT
            finally:
                for one in (message, left):
                    one.cancel()

        async def say(message: Message) -> None:
            if not gone.is_set():
                await send(message)

        streams: WeakSet[AsyncGenerator[Any, None]] = WeakSet()
        _streams.set(streams)
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
        finally:
            for stream in list(streams):
                # Whoever still waits for its next output is being cancelled.
                with suppress(RuntimeError):
                    await stream.aclose()
