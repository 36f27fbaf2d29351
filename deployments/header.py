"""A bound on an HTTP header while it arrives: uvicorn on httptools would gather one of any size."""

from __future__ import annotations

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedHeader", "bound_header"]


class BoundedHeader(HttpToolsProtocol):
    """Ends a connection whose header is not whole after `most` bytes and two reads of the socket."""

    most = 2**15
    _in_header = False
    _waiting = 0

    def on_message_begin(self) -> None:
        self._in_header, self._waiting = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_header = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        # The read in which a header begins may hold the end of the request before it.
        began = self._in_header
        super().data_received(data)
        if not (began and self._in_header) or self.transport.is_closing():
            return
        self._waiting += len(data)
        if self._waiting > self.most:
            self.send_400_response("The header is too large.")


def bound_header(most: int) -> None:
    """Let every uvicorn server that this process starts from now on bound its headers to `most` bytes."""
    BoundedHeader.most = most
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedHeader.__name__}"
