"""How much of a request is taken in before anybody looks at it: its header, its body, and the time both take."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsde.access.asgi import refuse
from dsde.config import LimitsConfig
from dsde.engine.refusal import RequestRefused

__all__ = ["Bounds"]


class Bounds:
    """ASGI middleware of a server: hands a request on once its body is whole, and refuses what is over `limits`."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig) -> None:
        self._app = app
        self._header_bytes = limits.header_kib * 2**10
        self._body_bytes = limits.message_mib * 2**20
        self._body_s = limits.body_s
        self._too_large = RequestRefused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is too large; accepted: limits.message_mib = {limits.message_mib} MiB",
        )
        self._header_too_large = RequestRefused(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the header is too large; accepted: limits.header_kib = {limits.header_kib} KiB",
        )
        self._too_slow = RequestRefused(
            HTTPStatus.REQUEST_TIMEOUT, f"the body took too long; accepted: limits.body_s = {limits.body_s:g} s"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            self._check_header(scope)
            body = await self._body(receive) if scope["type"] == "http" else None
        except RequestRefused as refused:
            await refuse(refused, scope, send, close=True)
            return
        except _Gone:
            return
        await self._app(scope, _after(body, receive) if body is not None else receive, send)

    def _check_header(self, scope: Scope) -> None:
        lines = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if lines + len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") > self._header_bytes:
            raise self._header_too_large
        for name, value in scope["headers"]:
            # Anything that is no number was refused by the server.
            if name == b"content-length" and int(value) > self._body_bytes:
                raise self._too_large

    async def _body(self, receive: Receive) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise _Gone
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._body_bytes:
                        raise self._too_large
        except TimeoutError:
            raise self._too_slow from None
        return bytes(body)


class _Gone(Exception):
    """The client left before its body was whole."""


def _after(body: bytes, receive: Receive) -> Receive:
    """A `receive` that has the whole body first."""
    given = False

    async def receive_whole() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_whole
