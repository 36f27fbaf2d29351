"""Why a request gets no answer, in the words and HTTP status of the OpenAI API. Needs no vLLM."""

from __future__ import annotations

__all__ = ["RequestRefused"]


class RequestRefused(Exception):
    """A request that is refused, or that failed.

    status: HTTP's status for it: 4xx where the request is at fault, 5xx where the server is.
    parameter: the OpenAI field at fault, where one is known; a dotted path reaches into it.
    retry_after_s: seconds after which the same request may be let in, where that is known.
    """

    def __init__(
        self, status: int, message: str, parameter: str | None = None, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.retry_after_s = retry_after_s
