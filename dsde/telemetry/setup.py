"""Starts what exports: OTLP as the standard OTEL_* variables say, and Prometheus through a registry.

Without an OTLP endpoint nothing is sent. Exporters work on threads of their own behind bounded queues, so one that is
slow or gone costs spans, never a request; the SDK counts what it dropped in its own otel.sdk.* metrics.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk import environment_variables as otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from dsde.telemetry.metrics import Metrics, views
from dsde.telemetry.registry import Registry, RegistryExporter

if TYPE_CHECKING:
    from dsde.config import TelemetryConfig

__all__ = [
    "Telemetry",
    "check_environment",
    "replica_environment",
    "serve_environment",
    "span_processors",
    "start",
    "traces_endpoint",
]

_REGISTRY_INTERVAL_MS = 2_000
_FIXED_RATIOS = {"parentbased_always_on": 1.0, "parentbased_always_off": 0.0}
_SIGNALS = ("TRACES", "METRICS")
_SERVE_EXPORTER = "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"
_SERVE_RATIO = "RAY_SERVE_TRACING_SAMPLING_RATIO"


def traces_endpoint(config: TelemetryConfig) -> str | None:
    """Where spans go, None when nobody traces."""
    return _endpoint(config, "TRACES")


def check_environment(config: TelemetryConfig) -> None:
    """Raise ValueError naming the variable, its value and what is accepted."""
    for signal in _SIGNALS:
        if _endpoint(config, signal) is None:
            continue
        own = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
        name = own if own in os.environ else otel.OTEL_EXPORTER_OTLP_PROTOCOL
        if os.environ.get(name, "grpc") != "grpc":
            raise ValueError(f"{name} = {os.environ[name]!r} is not accepted; it should be grpc")
    if traces_endpoint(config) is not None:
        _sampling_ratio()


def _sampling_ratio() -> float:
    """The share of traces to keep that have no parent, from OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG.

    A request with a `traceparent` follows it. ValueError names the variable.
    """
    sampler = os.environ.get(otel.OTEL_TRACES_SAMPLER, "parentbased_always_on")
    if sampler in _FIXED_RATIOS:
        return _FIXED_RATIOS[sampler]
    if sampler != "parentbased_traceidratio":
        raise ValueError(
            f"{otel.OTEL_TRACES_SAMPLER} = {sampler!r} is not accepted; it should be "
            f"{', '.join(_FIXED_RATIOS)} or parentbased_traceidratio"
        )
    text = os.environ.get(otel.OTEL_TRACES_SAMPLER_ARG, "1.0")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(
            f"{otel.OTEL_TRACES_SAMPLER_ARG} = {text!r} is not accepted; it should be a number from 0 to 1"
        )
    return ratio


def serve_environment(config: TelemetryConfig) -> dict[str, str]:
    """The variables by which Ray Serve makes spans, for all processes of a cluster; none when nobody traces.

    Serve's `tracing_config` would say the same, but Ray 2.60.0 does not hand it to its proxies.
    """
    if traces_endpoint(config) is None:
        return {}
    return {
        _SERVE_EXPORTER: "dsde.telemetry.setup:span_processors",
        _SERVE_RATIO: str(_sampling_ratio()),
        otel.OTEL_SERVICE_NAME: os.environ.get(otel.OTEL_SERVICE_NAME, "dsde"),
    }


def replica_environment() -> dict[str, str]:
    """What replicas need besides: where Serve traces, its proxy decides what is sampled.

    Serve does not pass on that a request is not sampled, so a replica that decided for itself would send fragments.
    """
    return {_SERVE_RATIO: "0.0"} if os.environ.get(_SERVE_EXPORTER) else {}


def span_processors() -> list[SpanProcessor]:
    """What sends spans away; Serve calls this in each of its processes, by its import path."""
    # Its counters are how a lost span shows.
    os.environ.setdefault(otel.OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED, "true")
    return [BatchSpanProcessor(OTLPSpanExporter())]


def _start_tracing(config: TelemetryConfig, resource: Resource) -> None:
    """Send this process's spans away, where somebody wants them and Serve's own tracing has not seen to it."""
    if traces_endpoint(config) is None or isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    provider = TracerProvider(resource=resource)
    for processor in span_processors():
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)


class Telemetry:
    """The telemetry of one process. model: its name in the API. endpoint: where spans go, or None."""

    def __init__(self, provider: MeterProvider, model: str, endpoint: str | None, *, registry: bool) -> None:
        self._provider, self._model = provider, model
        self.traces_endpoint = endpoint
        self.registry = registry

    @cached_property
    def metrics(self) -> Metrics:
        """Where an engine is booked; only a process that has one asks."""
        return Metrics(self._provider.get_meter("dsde"), self._model)


def start(config: TelemetryConfig, model: str, instance: str, registry: Registry | None) -> Telemetry | None:
    """Start the telemetry of this process; None when it is off, or nobody would see it.

    model: its name in the API. instance: the replica's id, service.instance.id in OTLP and ReplicaId in Prometheus.
    registry: ray.util.metrics in a Ray worker, None elsewhere.
    """
    if not config.enabled:
        return None
    resource = Resource.create({"service.instance.id": instance, **_service_name()})
    _start_tracing(config, resource)
    readers: list[MetricReader] = []
    if _endpoint(config, "METRICS") is not None:
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    with_registry = config.prometheus and registry is not None
    if with_registry and registry is not None:
        exporter = RegistryExporter(registry, {"ReplicaId": instance})
        readers.append(PeriodicExportingMetricReader(exporter, _REGISTRY_INTERVAL_MS))
    endpoint = traces_endpoint(config)
    if not readers and endpoint is None:
        return None
    provider = MeterProvider(readers, resource, views=views())
    # The span processors were made before; their counters find this provider here.
    metrics.set_meter_provider(provider)
    return Telemetry(provider, model, endpoint, registry=with_registry)


def _service_name() -> Mapping[str, str]:
    return {} if otel.OTEL_SERVICE_NAME in os.environ else {"service.name": "dsde"}


def _endpoint(config: TelemetryConfig, signal: str) -> str | None:
    chosen = os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp")
    if not config.enabled or chosen != "otlp" or os.environ.get(otel.OTEL_SDK_DISABLED, "").lower() == "true":
        return None
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return own or os.environ.get(otel.OTEL_EXPORTER_OTLP_ENDPOINT) or None
