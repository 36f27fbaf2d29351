"""An OTLP collector for tests: the protocol's own gRPC services, keeping what they get."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

__all__ = ["Collector", "Span", "collector"]


@dataclass(frozen=True)
class Span:
    """A span as it came in, ids in hex."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    status: int
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    resource: dict[str, Any]


@dataclass
class Collector:
    """What was received so far. instances: by metric, the service.instance.id of those who sent it."""

    endpoint: str
    spans: list[Span] = field(default_factory=list)
    instances: dict[str, set[str]] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Return when `condition` holds; AssertionError naming `what` when it never does."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), f"{what}: not within {timeout_s} s"

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of one trace, by their start."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start)


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector, delay_s: float) -> None:
        self._collector, self._delay_s = collector, delay_s

    def Export(self, request: Any, context: Any) -> Any:
        time.sleep(self._delay_s)
        with self._collector.changed:
            for resource in request.resource_spans:
                about = _attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._collector.spans += [_span(span, about) for span in scope.spans]
            self._collector.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        with self._collector.changed:
            for resource in request.resource_metrics:
                about = _attributes(resource.resource.attributes)
                self._collector.services.add(about["service.name"])
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        known = self._collector.instances.setdefault(metric.name, set())
                        known.add(about["service.instance.id"])
            self._collector.changed.notify_all()
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collector(delay_s: float = 0.0) -> Iterator[Collector]:
    """A collector on a free port of loopback. delay_s: how long it lets each export of spans wait."""
    server = grpc.server(ThreadPoolExecutor(4))
    port = server.add_insecure_port("127.0.0.1:0")
    received = Collector(f"http://127.0.0.1:{port}")
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(received, delay_s), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(received), server)
    server.start()
    try:
        yield received
    finally:
        server.stop(0).wait()


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        status=span.status.code,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
        resource=resource,
    )


def _attributes(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
