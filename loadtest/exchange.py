"""One request and the parts of its answer, whichever way they travel."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from loadtest.workload import Prompt

__all__ = ["End", "Failure", "Request", "Sender"]


@dataclass(frozen=True, slots=True)
class Request:
    """at_s: when it is due, in seconds after the start. policy: a speculation policy of its own. ignore_eos: write
    all of output_tokens.
    """

    request_id: str
    prompt: Prompt
    protocol: str
    at_s: float
    policy: str | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """How an answer ended; see records.Record."""

    answer_id: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    speculation: Mapping[str, Any] | None


class Failure(Exception):
    """No answer, or only a part. kind: a few words to count by, as in `http 503`; the text is the server's."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Sender(Protocol):
    """A way to a server."""

    def send(self, request: Request, timeout_s: float) -> AsyncGenerator[int | End, None]:
        """For each message its new tokens, then the End. Raises Failure; closing it cancels the request."""
        ...

    async def model(self) -> tuple[str, str]:
        """(name of the served model, where its tokenizer is, which may be empty). Raises Failure."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
