"""Requests made from the OpenAPI document that is served, valid and not, against the whole ingress without an engine.

Whatever comes, the answer is quick, no defect of the server, and no engine hears of what is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core import NotSet

from tests.engine.test_bad_input import OPERATIONS, PATIENCE_S, Ingress

INVALID, VALID = 100, 25
"""Cases of each operation; test_bad_input.py has more than a thousand of each beside these."""


@pytest.fixture(scope="module")
def ingress() -> Iterator[Ingress]:
    with asyncio.Runner() as runner:
        yield Ingress(runner)


@pytest.fixture(scope="module")
def document(ingress: Ingress) -> schemathesis.schemas.BaseSchema:
    return schemathesis.openapi.from_dict(ingress.get("/openapi.json").json())


@pytest.mark.parametrize(
    ("mode", "cases"), [(GenerationMode.NEGATIVE, INVALID), (GenerationMode.POSITIVE, VALID)], ids=["invalid", "valid"]
)
@pytest.mark.parametrize("path", [*OPERATIONS, "/tokenize", "/detokenize"])
def test_any_body_has_an_answer(ingress: Ingress, document: Any, path: str, mode: GenerationMode, cases: int) -> None:
    refused = 0

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=document[path]["POST"].as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        nonlocal refused
        body = b"" if isinstance(case.body, NotSet) else case.body
        calls, start = len(ingress.calls), time.process_time()
        answer = ingress.post(path, body, content_type=case.media_type or "application/json")
        assert time.process_time() - start < PATIENCE_S
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        if answer.status_code != 200:
            refused += 1
            assert answer.json()["error"]["message"]
            assert len(ingress.calls) == calls

    check()
    # vLLM reads some values more freely than the document says, such as numbers in quotes.
    assert mode is GenerationMode.POSITIVE or refused > cases / 2
    ingress.probe()
