"""The bound on a header, on a real uvicorn server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.config import HTTP_PROTOCOLS

from deployments.header import BoundedHeader, bound_header

MOST = 4096


async def app(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = str(size).encode()
    length = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    monkeypatch.setattr(BoundedHeader, "most", BoundedHeader.most)
    bound_header(MOST)
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(10):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def exchange(port: int, *pieces: bytes) -> bytes:
    """What comes back to pieces that are sent one by one, each read before the next."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        return await asyncio.wait_for(reader.read(65536), 5)
    finally:
        writer.close()


def request(body: bytes = b"", header: bytes = b"") -> bytes:
    return b"POST / HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (header, len(body), body)


async def test_a_header_that_does_not_end_is_ended(port: int) -> None:
    for start in (b"GET / HTTP/1.1\r\nx-long: ", b"GET /"):
        told = await exchange(port, start, *[b"x" * 1000] * 6)
        assert told.startswith(b"HTTP/1.1 400 ")
        assert b"The header is too large." in told


async def test_a_body_may_be_longer_than_a_header(port: int) -> None:
    body = b"x" * 10 * MOST
    whole = request(body)
    for pieces in ([whole], [whole[:20], whole[20:]], [whole[:-1], whole[-1:]]):
        assert (await exchange(port, *pieces)).endswith(str(len(body)).encode())


async def test_requests_on_one_connection_are_bounded_one_by_one(port: int) -> None:
    header = b"x-long: " + b"x" * 2000 + b"\r\n"
    pieces = [request(header=header)[:1500], request(header=header)[1500:]] * 4
    told = await exchange(port, *pieces)
    assert told.count(b"HTTP/1.1 200 ") == 4


async def test_the_end_of_a_body_does_not_count_for_the_header_behind_it(port: int) -> None:
    body = b"x" * 3 * MOST
    both = request(body) + request()
    middle = len(request(body)) - 2 * MOST, len(request(body)) + 20
    told = await exchange(port, both[: middle[0]], both[middle[0] : middle[1]], both[middle[1] :])
    assert told.count(b"HTTP/1.1 200 ") == 2
