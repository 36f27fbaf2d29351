"""What is asked, and what comes back, whichever way it travels."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "Ask", "ClientError", "Question"]


class ClientError(Exception):
    """No answer; the text says why and what to do, in one line."""


@dataclass(frozen=True, slots=True)
class Question:
    """One user message. None leaves the server's default in force.

    max_tokens: longest answer in tokens. policy: a speculation policy for this request.
    """

    prompt: str
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    policy: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation, as the OpenAI API writes it."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.prompt}]


@dataclass(frozen=True, slots=True)
class Answer:
    """How an answer ended; its text went before it.

    speculation: `metrics.speculative_decoding` as README describes it, None where the server sent none.
    """

    request_id: str
    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    speculation: dict[str, Any] | None


Ask = Callable[[Question, str, str | None, bool], AsyncGenerator[str | Answer, None]]
"""(question, where, API key, whether to stream) -> pieces of text, then the Answer. Raises ClientError; closing it
cancels the request."""
