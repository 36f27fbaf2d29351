"""What a client hears of an answer that breaks off in the proxy."""

from __future__ import annotations

import json

import pytest
from starlette.types import Message, Receive, Scope, Send

from deployments.stream_end import GONE, StreamEnd

START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [[b"content-type", b"text/event-stream; charset=utf-8"]],
}
PART: Message = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}


async def told_of(*messages: Message) -> list[Message]:
    told: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for one in messages:
            await send(one)

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        told.append(message)

    await StreamEnd(app)({"type": "http"}, receive, send)
    return told


@pytest.mark.parametrize("sent", [(START,), (START, PART), (START, PART, PART)])
async def test_a_cut_stream_ends_in_an_error_event(sent: tuple[Message, ...]) -> None:
    *before, last = await told_of(*sent)
    assert before == [*sent]
    assert last["type"] == "http.response.body"
    assert not last.get("more_body", False)
    text = last["body"].decode()
    assert text.endswith("\n\n")
    error = json.loads(text.removeprefix("data: "))["error"]
    assert (error["code"], error["message"]) == (503, GONE)


@pytest.mark.parametrize(
    "sent", [(), (START, PART, END), ({**START, "headers": [[b"content-type", b"application/json"]]}, PART)]
)
async def test_all_else_passes_as_it_is(sent: tuple[Message, ...]) -> None:
    assert await told_of(*sent) == [*sent]
