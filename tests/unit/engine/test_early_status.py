"""Which status a client sees of answers that end in their first event, later, or never."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.testclient import TestClient

from dsde.engine.early_status import EarlyStatus

ERROR = '{{"error": {{"message": "full", "code": {}}}}}'
TOKEN = 'data: {"choices": []}\n\n'
DONE = "data: [DONE]\n\n"


def stream(*events: str) -> Response:
    def body() -> Iterator[str]:
        yield from events

    return StreamingResponse(body(), media_type="text/event-stream")


def ask(response: Response) -> tuple[int, str, str | None, str]:
    got = TestClient(EarlyStatus(response)).get("/")
    return got.status_code, got.headers["content-type"].split(";")[0], got.headers.get("retry-after"), got.text


@pytest.mark.parametrize(("code", "after"), [(503, "1"), (429, "1"), (500, None)])
def test_a_stream_that_begins_with_an_error_is_that_error(code: int, after: str | None) -> None:
    told = ERROR.format(code)
    assert ask(stream(f"data: {told}\n\n", DONE)) == (code, "application/json", after, told)


def test_an_error_after_a_token_stays_an_event() -> None:
    events = (TOKEN, f"data: {ERROR.format(503)}\n\n", DONE)
    assert ask(stream(*events)) == (200, "text/event-stream", None, "".join(events))


def test_other_answers_pass_as_they_are() -> None:
    assert ask(stream(TOKEN, DONE)) == (200, "text/event-stream", None, TOKEN + DONE)
    assert ask(JSONResponse({"a": 1})) == (200, "application/json", None, '{"a":1}')
    assert ask(JSONResponse({"a": 1}, 400)) == (400, "application/json", None, '{"a":1}')
    assert ask(JSONResponse({"a": 1}, 503)) == (503, "application/json", "1", '{"a":1}')
    assert ask(JSONResponse({"a": 1}, 503, {"retry-after": "9"}))[2] == "9"
    assert TestClient(EarlyStatus(Response(status_code=204))).get("/").status_code == 204
