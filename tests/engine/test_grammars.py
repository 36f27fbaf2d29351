"""A stream of grammars nobody sent before: each is compiled in bounded time, and what is kept of them is bounded."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from dsde.config import LimitsConfig, from_values
from dsde.engine.plugin import engine_arguments

KEPT_MB = 1
PROPERTIES = 1840


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> XgrammarBackend:
    from transformers import AutoTokenizer

    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", str(KEPT_MB))
    config = AsyncEngineArgs(**engine_arguments(from_values({}))).create_engine_config()
    tokenizer = AutoTokenizer.from_pretrained(config.model_config.tokenizer)
    return XgrammarBackend(config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size())


def schema(number: int, properties: int) -> str:
    fields: dict[str, Any] = {f"field_{number}_{one}": {"type": "string"} for one in range(properties)}
    return json.dumps({"type": "object", "properties": fields, "additionalProperties": False})


def test_two_thousand_schemas_leave_no_more_than_the_cache_may_hold(backend: XgrammarBackend) -> None:
    start = time.monotonic()
    for number in range(2000):
        backend.compile_grammar(StructuredOutputOptions.JSON, schema(number, 1))
    assert time.monotonic() - start < 60
    # It drops old ones when the newest is in.
    assert 0.5 < backend.compiler.get_cache_size_bytes() / (KEPT_MB * 2**20) < 1.1


def test_the_largest_schema_does_not_stop_its_process(backend: XgrammarBackend) -> None:
    largest = schema(0, PROPERTIES)
    assert 0.9 < len(largest) / (LimitsConfig().grammar_kib * 2**10) <= 1
    compiled = threading.Thread(target=backend.compile_grammar, args=(StructuredOutputOptions.JSON, largest))
    start = time.monotonic()
    compiled.start()
    longest, last = 0.0, start
    # As an engine would go on with its steps.
    while compiled.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert last - start < 60
    assert longest < 1
