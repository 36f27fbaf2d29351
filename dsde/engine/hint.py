"""`x-dsde-hint`: a request's hint as an HTTP header or gRPC metadata, for a gateway that does not touch bodies."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import VLLMValidationError

from dsde.routing.request import HINT, MAX_HINT

__all__ = ["HINT_HEADER", "HintHeader", "note_hint", "with_hint"]

HINT_HEADER = "x-dsde-hint"
_hint: ContextVar[str | None] = ContextVar(HINT_HEADER, default=None)


def note_hint(headers: Mapping[str, str]) -> None:
    """Remember the hint of the request that this task answers. headers: names in lower case."""
    _hint.set(headers.get(HINT_HEADER))


def with_hint(extra_args: dict[str, Any] | None) -> dict[str, Any] | None:
    """`extra_args` of a request of this task with the hint of its header, unless they have one.

    Raises VLLMValidationError (HTTP 400) naming the header, its value and what is accepted.
    """
    hint = _hint.get()
    if hint is None or (extra_args and HINT in extra_args):
        return extra_args
    if not 1 <= len(hint) <= MAX_HINT:
        raise VLLMValidationError(
            f"{HINT_HEADER} = {hint!r}: accepted: a name of 1 to {MAX_HINT} characters", parameter=HINT_HEADER
        )
    return {**(extra_args or {}), HINT: hint}


class HintHeader:
    """ASGI middleware that notes the hint of each HTTP request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            note_hint(Headers(scope=scope))
        await self._app(scope, receive, send)
