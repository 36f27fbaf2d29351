"""Spans, through the SDK, over the wire, to a collector that speaks the protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from dsde.telemetry.metrics import views
from dsde.telemetry.tracing import RequestSpan, context_from, headers_of, is_sampled, operation_of
from tests.collector import Collector, collector

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SAMPLING = SimpleNamespace(max_tokens=24, temperature=0.0, top_p=1.0, seed=None)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collector() as running:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(running.endpoint), schedule_delay_millis=50))
        monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
        yield running
        provider.shutdown()


def answer(content: bool = False, error: Exception | None = None) -> RequestSpan:
    span = RequestSpan("embedded", "chatcmpl-1", SAMPLING, {"traceparent": PARENT}, content=content)
    span.prompt(7, "a secret question")
    span.tokens(0, 1, "a secret", None, cumulative=False)
    span.tokens(0, 2, " answer", "length", cumulative=False)
    span.figures(
        {"policy": "paper", "kld": {"mean": 0.5, "last": None}}, [("dsde.speculation.on", 5, {"dsde.step": 0})]
    )
    span.end(error)
    return span


def test_a_span_follows_the_conventions_and_the_client_s_trace(received: Collector) -> None:
    answer()
    received.wait(lambda: len(received.spans) == 1, 10, "a span")
    (span,) = received.spans
    assert span.name == "chat embedded"
    assert (span.trace_id, span.parent_id) == (PARENT.split("-")[1], PARENT.split("-")[2])
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "embedded",
        "gen_ai.response.model": "embedded",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "dsde.policy": "paper",
        "dsde.kld.mean": 0.5,
    }
    assert span.events == [("dsde.speculation.on", 5, {"dsde.step": 0})]
    assert "secret" not in str(span)


def test_content_is_recorded_only_when_told_to(received: Collector) -> None:
    answer(content=True)
    received.wait(lambda: len(received.spans) == 1, 10, "a span")
    attributes = received.spans[0].attributes
    assert json.loads(attributes["gen_ai.input.messages"])[0]["parts"][0]["content"] == "a secret question"
    assert json.loads(attributes["gen_ai.output.messages"])[0] == {
        "role": "assistant",
        "parts": [{"type": "text", "content": "a secret answer"}],
    }


def test_an_error_ends_the_span_as_one(received: Collector) -> None:
    answer(error=RuntimeError("it broke"))
    received.wait(lambda: len(received.spans) == 1, 10, "a span")
    assert received.spans[0].status == 2
    assert received.spans[0].attributes["error.type"] == "RuntimeError"


def test_the_engine_s_headers_name_this_span(received: Collector) -> None:
    span = answer()
    received.wait(lambda: len(received.spans) == 1, 10, "a span")
    assert span.headers == {"traceparent": f"00-{received.spans[0].trace_id}-{received.spans[0].span_id}-01"}


def test_without_tracing_a_client_s_trace_is_passed_on() -> None:
    span = RequestSpan("embedded", "cmpl-1", SAMPLING, {"traceparent": PARENT})
    assert span.headers == {"traceparent": PARENT}
    assert RequestSpan("embedded", "cmpl-1", SAMPLING, None).headers == {}
    assert headers_of() == {}
    assert is_sampled({"traceparent": PARENT})
    assert not is_sampled({"traceparent": PARENT.removesuffix("1") + "0"})
    assert not is_sampled(None)
    assert (
        trace.get_current_span(context_from({"traceparent": PARENT})).get_span_context().span_id == 0xB7AD6B7169203331
    )


def test_a_collector_that_is_slow_or_gone_costs_spans_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "true")
    with collector(delay_s=5) as slow:
        gone = "http://127.0.0.1:9"
        for endpoint in (slow.endpoint, gone):
            reader = InMemoryMetricReader()
            provider = TracerProvider(shutdown_on_exit=False)
            exporter = OTLPSpanExporter(endpoint, timeout=1)
            processor = BatchSpanProcessor(
                exporter,
                max_queue_size=16,
                max_export_batch_size=8,
                schedule_delay_millis=1,
                meter_provider=MeterProvider([reader], views=views()),
            )
            provider.add_span_processor(processor)
            tracer = provider.get_tracer("test")
            start = time.perf_counter()
            for _ in range(2000):
                tracer.start_span("request").end()
            assert time.perf_counter() - start < 1.0
            assert lost(reader) > 1000
            exporter.shutdown()


def lost(reader: InMemoryMetricReader) -> int:
    data = reader.get_metrics_data()
    assert data is not None
    metrics = [metric for one in data.resource_metrics for scope in one.scope_metrics for metric in scope.metrics]
    return sum(
        int(getattr(point, "value", 0))
        for metric in metrics
        for point in metric.data.data_points
        if metric.name == "otel.sdk.processor.span.processed" and "error.type" in (point.attributes or {})
    )


@pytest.mark.parametrize(
    ("request_id", "operation"),
    [("chatcmpl-a-b", "chat"), ("cmpl-a", "text_completion"), ("resp_a", "chat"), ("other", "text_completion")],
)
def test_the_operation_comes_from_the_id(request_id: str, operation: str) -> None:
    assert operation_of(request_id) == operation
