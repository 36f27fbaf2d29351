"""Cancelling reaches an application as a disconnect, and ends what does not listen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from dsde.engine import disconnect
from dsde.engine.disconnect import DisconnectOnCancel, closed_with_request

HTTP = {"type": "http"}


class Answering:
    """As vLLM answers: in a task of its own, beside one that listens for the disconnect."""

    def __init__(self, step: Callable[[], Awaitable[Any]]) -> None:
        self._step = step
        self.ended = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            try:
                await self._step()
                self.ended = "answered"
            except asyncio.CancelledError:
                self.ended = "cancelled"
                raise

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        running = [asyncio.ensure_future(one()) for one in (answer, listen)]
        _, pending = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for one in pending:
            one.cancel()
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200})


class Client:
    """A client that says nothing more. fails: its receive ends in an error, as Serve's does at a cancel."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails
        self.told: list[Message] = []
        self.called = asyncio.Event()

    async def receive(self) -> Message:
        self.called.set()
        try:
            return await asyncio.Future[Message]()
        except asyncio.CancelledError:
            if self._fails:
                raise RuntimeError("cancelled") from None
            raise

    async def send(self, message: Message) -> None:
        self.told.append(message)


async def cancelled(app: Any, client: Client) -> None:
    request = asyncio.create_task(DisconnectOnCancel(app)(HTTP, client.receive, client.send))
    await client.called.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancel_ends_what_answers_in_another_task(fails: bool) -> None:
    app, client = Answering(asyncio.Event().wait), Client(fails)
    await cancelled(app, client)
    assert app.ended == "cancelled"
    assert client.told == []


async def test_without_a_cancel_nothing_changes() -> None:
    app, client = Answering(lambda: asyncio.sleep(0.01)), Client()
    await DisconnectOnCancel(app)(HTTP, client.receive, client.send)
    assert app.ended == "answered"
    assert client.told == [{"type": "http.response.start", "status": 200}]


async def test_what_does_not_listen_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "_END_S", 0.01)
    ended = []

    async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await receive()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    await cancelled(deaf, Client())
    await asyncio.sleep(0)
    assert ended == ["cancelled"]


async def test_an_error_comes_out() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("no")

    client = Client()
    with pytest.raises(ValueError, match="no"):
        await DisconnectOnCancel(failing)(HTTP, client.receive, client.send)


async def test_a_client_that_cannot_be_heard_any_more_is_gone() -> None:
    app, client = Answering(asyncio.Event().wait), Client()

    async def broken() -> Message:
        raise RuntimeError("the proxy went away")

    await DisconnectOnCancel(app)(HTTP, broken, client.send)
    assert app.ended == "cancelled"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_that_is_left_unclosed_is_closed_with_its_request(fails: bool) -> None:
    ended = []
    kept = []

    async def outputs() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            ended.append("closed")

    async def leaving(scope: Scope, receive: Receive, send: Send) -> None:
        stream = closed_with_request(outputs())
        kept.append(stream)
        assert await anext(stream) == 1
        if fails:
            raise ValueError("no")

    client = Client()
    running = DisconnectOnCancel(leaving)(HTTP, client.receive, client.send)
    if fails:
        with pytest.raises(ValueError, match="no"):
            await running
    else:
        await running
    assert ended == ["closed"]
    # Outside a request nothing is held.
    assert await anext(closed_with_request(outputs())) == 1
