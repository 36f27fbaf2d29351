"""A metric exporter into a registry of counters, gauges and histograms, as ray.util.metrics is one.

Ray has one Prometheus endpoint for each node; what its registry is told shows up there beside Ray's and vLLM's own
metrics. It counts by itself, so this exporter takes deltas. A histogram's buckets arrive exactly; Ray makes their sum
from the middles of the buckets, wherever a value comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from opentelemetry.sdk.metrics import Counter, Histogram, ObservableCounter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    Sum,
)

from dsde.telemetry.names import labels

__all__ = ["Registry", "RegistryExporter", "prometheus_name"]

_DELTA: dict[type, AggregationTemporality] = dict.fromkeys(
    (Counter, Histogram, ObservableCounter), AggregationTemporality.DELTA
)
_UNITS = {"s": "seconds", "ms": "milliseconds", "By": "bytes"}


class Registry(Protocol):
    """The three classes of ray.util.metrics; each makes the metric of a name, a description and its label names."""

    Counter: Any
    Gauge: Any
    Histogram: Any


class RegistryExporter(MetricExporter):
    """Tells `registry` every change of every metric. constant: labels that every metric carries, by name."""

    def __init__(self, registry: Registry, constant: Mapping[str, str]) -> None:
        super().__init__(preferred_temporality=_DELTA)
        self._registry, self._constant = registry, dict(constant)
        self._known: dict[str, Any] = {}

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any) -> MetricExportResult:
        for metric in _metrics(metrics_data):
            for point in metric.data.data_points:
                self._tell(metric, point)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
        """The registry belongs to the process and outlives this exporter."""

    def _tell(self, metric: Metric, point: Any) -> None:
        attributes = point.attributes or {}
        tags = {_label(key): str(attributes.get(key, "")) for key in labels(metric.name)} | self._constant
        if isinstance(point, HistogramDataPoint):
            told = self._instrument(metric, self._registry.Histogram, boundaries=list(point.explicit_bounds))
            for value, count in zip(_middles(point.explicit_bounds), point.bucket_counts, strict=True):
                for _ in range(count):
                    told.observe(value, tags)
        elif isinstance(metric.data, Sum) and metric.data.is_monotonic:
            told = self._instrument(metric, self._registry.Counter)
            if point.value > 0:
                told.inc(point.value, tags)
        else:
            self._instrument(metric, self._registry.Gauge).set(point.value, tags)

    def _instrument(self, metric: Metric, kind: Any, **extra: Any) -> Any:
        if metric.name not in self._known:
            self._known[metric.name] = kind(
                prometheus_name(metric.name, metric.unit),
                description=metric.description or metric.name,
                tag_keys=(*map(_label, labels(metric.name)), *self._constant),
                **extra,
            )
        return self._known[metric.name]


def prometheus_name(name: str, unit: str | None) -> str:
    """The metric's name in Prometheus, by OpenTelemetry's rules, without the suffixes of counters and histograms."""
    suffix = _UNITS.get(unit or "", "")
    return _label(name) + (f"_{suffix}" if suffix else "")


def _label(name: str) -> str:
    return name.replace(".", "_")


def _metrics(data: MetricsData) -> Iterator[Metric]:
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def _middles(bounds: Any) -> list[float]:
    """A value inside each bucket; `bounds` are ascending upper bounds above 0, the last bucket has none."""
    lower = [0.0, *bounds]
    return [(low + high) / 2 for low, high in zip(lower, bounds, strict=False)] + [math.nextafter(lower[-1], math.inf)]
