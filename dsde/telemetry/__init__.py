"""Metrics and traces: the only package that imports opentelemetry. `setup` is the only place that reads OTEL_*."""
