"""HTTP's refusals as gRPC statuses, with google.rpc details."""

from __future__ import annotations

import math
from typing import Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

__all__ = ["Context", "set_status"]

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
# A status travels in HTTP/2 trailers, of which clients take 8 KiB; the text is in there three times.
_LONGEST_TEXT = 1000


class Context(Protocol):
    """What Serve hands a method of the call: its own stand-in for grpc.ServicerContext."""

    def invocation_metadata(self) -> list[tuple[str, str]]: ...

    def peer(self) -> str: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, bytes]]) -> None: ...


def set_status(
    context: Context, http_status: int, text: str, field: str | None = None, retry_after_s: float | None = None
) -> None:
    """End the call with HTTP's status in gRPC's terms.

    Among the details a `field` at fault stands in a BadRequest, the time after which to try again in a RetryInfo.

    The method must return or yield a message afterwards: Serve carries the status with it. It would carry one by an
    exception too, but without the details, and with a traceback in the log for every bad request.
    """
    code = _CODES.get(int(http_status), grpc.StatusCode.INTERNAL)
    if len(text) > _LONGEST_TEXT:
        text = text[: _LONGEST_TEXT - 3] + "..."
    context.set_code(code)
    context.set_details(text)
    details: list[Message] = []
    if field is not None:
        details.append(BadRequest(field_violations=[BadRequest.FieldViolation(field=field, description=text)]))
    if retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(math.ceil(retry_after_s * 1e3))
        details.append(RetryInfo(retry_delay=delay))
    if details:
        status = Status(code=code.value[0], message=text)
        for one in details:
            status.details.add().Pack(one)
        context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
