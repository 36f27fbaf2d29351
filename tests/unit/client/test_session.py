from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from dsde.client.exchange import Answer, ClientError, Question
from dsde.client.session import figures, run

SPECULATION: dict[str, Any] = {
    "mean_acceptance_length": 2.25,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 12,
    "dsde": {
        "policy": "paper",
        "steps": 5,
        "steps_off": 1,
        "speculation_length": {"mean": 2.4, "max": 4, "limit": 8},
        "kld": {"mean": 0.5, "last": 0.25, "max": 1.0},
        "stability": 0.75,
        "straggler": {"wait_ms": 12.4, "caused_ms": 0.0, "steps": 0},
    },
}
ANSWER = Answer("id", "embedded", "stop", 7, 11, SPECULATION)


async def ask(question: Question, where: str, api_key: str | None, stream: bool) -> AsyncGenerator[str | Answer, None]:
    for text in ("One", " two"):
        yield text
    yield ANSWER


async def unanswered(
    question: Question, where: str, api_key: str | None, stream: bool
) -> AsyncGenerator[str | Answer, None]:
    yield "One"
    raise ClientError(f"{where} is away")


async def interrupted(
    question: Question, where: str, api_key: str | None, stream: bool
) -> AsyncGenerator[str | Answer, None]:
    yield "One"
    raise KeyboardInterrupt


def test_text_goes_to_stdout_and_figures_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ask, Question("?"), "here", None, True, False) == 0
    captured = capsys.readouterr()
    assert captured.out == "One two\n"
    for shown in ("7 in, 11 out (stop)", "length 2.25", "5 of 12 drafts", "mean 2.40, max 4, limit 8", "waited 12 ms"):
        assert shown in captured.err


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ask, Question("?"), "here", None, True, True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["completion_tokens"], answer["speculation"]) == ("One two", 11, SPECULATION)
    assert answer["timing"]["first_text_ms"] <= answer["timing"]["total_ms"]


def test_no_answer_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(unanswered, Question("?"), "here", None, True, False) == 1
    assert capsys.readouterr().err == "dsde client: here is away\n"


def test_an_interrupt_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, Question("?"), "here", None, True, False)
    assert capsys.readouterr().err == "\ndsde client: cancelled\n"


def test_what_was_not_measured_is_a_dash() -> None:
    dsde = {**SPECULATION["dsde"], "kld": {}, "stability": None}
    rows = dict(figures(Answer("id", "m", "stop", 1, 1, {**SPECULATION, "dsde": dsde}), 1.0, 1.0))
    assert (rows["KLD"], rows["stability"]) == ("mean -, last - nats", "-")
    rows = dict(figures(Answer("id", "m", "stop", 1, 1, None), 1.0, 1.0))
    assert rows["speculation"] == "the server sent no figures"
