"""The Grafana dashboard and the Prometheus alert rules, described once.

`python -m dsde.telemetry.monitoring k8s` writes k8s/dashboards/dsde.json, and the rules as Prometheus reads them,
k8s/alerts/dsde.yaml, and as its operator does, k8s/alerts/prometheus-rule.yaml.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dsde.telemetry import names
from dsde.telemetry.names import Instrument
from dsde.telemetry.registry import prometheus_name

__all__ = ["ALERTS", "PANELS", "Alert", "Panel", "alert_rules", "dashboard", "main"]

RATE = "$__rate_interval"
"""Grafana's own interval for rates; a rule has the fixed one below."""
_RULE_RATE = "5m"
_PROMETHEUS_RULE = {
    "apiVersion": "monitoring.coreos.com/v1",
    "kind": "PrometheusRule",
    "metadata": {"name": "dsde"},
}


@dataclass(frozen=True, slots=True)
class Panel:
    """A time series. queries: (PromQL, legend). unit: Grafana's."""

    row: str
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when `value`, PromQL, has been `comparison` for `lasts`."""

    name: str
    value: str
    comparison: str
    lasts: str
    summary: str
    description: str


def _ray(one: Instrument, suffix: str = "") -> str:
    return f"ray_{prometheus_name(one.name, one.unit)}{suffix}"


def _rate(one: Instrument, by: str, window: str = RATE, where: str = "", suffix: str = "_total") -> str:
    return f"sum by ({by}) (rate({_ray(one, suffix)}{where}[{window}]))"


def _quantile(one: Instrument, share: float, by: str = "", window: str = RATE) -> str:
    keys = ", ".join(filter(None, ["le", by]))
    return f"histogram_quantile({share}, {_rate(one, keys, window, suffix='_bucket')})"


def _share(
    part: Instrument, whole: Instrument, by: str, window: str = RATE, part_where: str = "", where: str = ""
) -> str:
    return f"{_rate(part, by, window, part_where)} / ({_rate(whole, by, window, where)} > 0)"


def _by_replica(one: Instrument) -> tuple[tuple[str, str], ...]:
    return ((f"max by (ReplicaId) ({_ray(one)})", "{{ReplicaId}}"),)


_LOST = (
    'sum(rate({__name__=~"ray_otel_sdk_(processor_span_processed|exporter_span_exported|'
    'exporter_metric_data_point_exported)_total", error_type!=""}[%s])) or vector(0)'
)

PANELS: tuple[Panel, ...] = (
    Panel("Serving", "Goodput", "short", _by_replica(names.GOODPUT), "Tokens per second that decoding emitted."),
    Panel(
        "Serving",
        "Requests",
        "short",
        (
            (f"max by (ReplicaId) ({_ray(names.RUNNING)})", "running {{ReplicaId}}"),
            (f"max by (ReplicaId) ({_ray(names.WAITING)})", "waiting {{ReplicaId}}"),
        ),
    ),
    Panel(
        "Serving",
        "Requests per second, by class",
        "reqps",
        (
            (
                _rate(names.REQUEST_DURATION, "dsde_request_class, error_type", suffix="_count"),
                "{{dsde_request_class}} {{error_type}}",
            ),
        ),
    ),
    Panel(
        "Serving",
        "Request duration",
        "s",
        ((_quantile(names.REQUEST_DURATION, 0.5), "median"), (_quantile(names.REQUEST_DURATION, 0.95), "95 %")),
    ),
    Panel(
        "Serving",
        "Time to first token",
        "s",
        ((_quantile(names.TIME_TO_FIRST_TOKEN, 0.5), "median"), (_quantile(names.TIME_TO_FIRST_TOKEN, 0.95), "95 %")),
    ),
    Panel(
        "Serving",
        "Time per output token",
        "s",
        (
            (_quantile(names.TIME_PER_OUTPUT_TOKEN, 0.5, "dsde_policy"), "median {{dsde_policy}}"),
            (_quantile(names.TIME_PER_OUTPUT_TOKEN, 0.95, "dsde_policy"), "95 % {{dsde_policy}}"),
        ),
    ),
    Panel("Speculation", "Speculation length", "short", _by_replica(names.RECENT_LENGTH)),
    Panel(
        "Speculation",
        "Acceptance rate",
        "percentunit",
        ((_share(names.ACCEPTED_TOKENS, names.DRAFT_TOKENS, "dsde_policy"), "{{dsde_policy}}"),),
    ),
    Panel(
        "Speculation",
        "Steps with and without drafts",
        "short",
        ((_rate(names.STEPS, "dsde_state, dsde_reason"), "{{dsde_state}}: {{dsde_reason}}"),),
    ),
    Panel("Stability", "KLD now", "short", _by_replica(names.RECENT_KLD), "Nats, mean of the verified positions."),
    Panel(
        "Stability",
        "KLD of requests",
        "short",
        (
            (_quantile(names.KLD, 0.5, "dsde_request_class"), "median {{dsde_request_class}}"),
            (_quantile(names.KLD, 0.95, "dsde_request_class"), "95 % {{dsde_request_class}}"),
        ),
    ),
    Panel(
        "Stability",
        "WVIR and stability",
        "short",
        ((_quantile(names.WVIR, 0.95), "WVIR 95 %"), (_quantile(names.STABILITY, 0.5), "stable share, median")),
    ),
    Panel(
        "Stragglers",
        "Straggler ratio",
        "short",
        ((_quantile(names.STRAGGLER_RATIO, 0.5), "median"), (_quantile(names.STRAGGLER_RATIO, 0.95), "95 %")),
        "Longest speculation length of a batch over the mean of its members.",
    ),
    Panel("Stragglers", "Draft slots left unused", "percentunit", _by_replica(names.RECENT_UNUSED_SLOTS)),
    Panel(
        "Stragglers",
        "Straggler share",
        "percentunit",
        _by_replica(names.RECENT_STRAGGLER_SHARE),
        "Share of decoding time that requests waited for longer members of their batch.",
    ),
    Panel(
        "Stragglers",
        "Time a request waited for longer drafts",
        "s",
        ((_quantile(names.STRAGGLER_WAIT, 0.5), "median"), (_quantile(names.STRAGGLER_WAIT, 0.95), "95 %")),
    ),
    Panel(
        "Cost",
        "Controller, per engine step",
        "s",
        ((_quantile(names.CONTROLLER_DURATION, 0.5), "median"), (_quantile(names.CONTROLLER_DURATION, 0.99), "99 %")),
    ),
    Panel("Cost", "Telemetry lost", "short", ((_LOST % RATE, "spans and points per second"),)),
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        "DsdeAcceptanceCollapse",
        _share(names.ACCEPTED_TOKENS, names.DRAFT_TOKENS, "ReplicaId, dsde_policy", _RULE_RATE),
        "< 0.15",
        "10m",
        "Drafts of {{ $labels.ReplicaId }} are hardly ever accepted",
        "Only {{ $value | humanizePercentage }} of the draft tokens of policy {{ $labels.dsde_policy }} are accepted: "
        "the draft model does not fit the traffic, or not the target. Policy goodput stops drafting in such a case.",
    ),
    Alert(
        "DsdeStragglers",
        _quantile(names.STRAGGLER_RATIO, 0.9, "ReplicaId", _RULE_RATE),
        "> 4",
        "10m",
        "Batches of {{ $labels.ReplicaId }} wait for their longest member",
        "In a tenth of the steps the longest draft is {{ $value | humanize }} times the mean one: lower "
        "speculation.max_length, or take a policy with a cap.",
    ),
    Alert(
        "DsdeSpeculationOff",
        _share(
            names.STEPS,
            names.STEPS,
            "ReplicaId, dsde_policy",
            _RULE_RATE,
            '{dsde_state="off", dsde_policy!="autoregressive"}',
        ),
        "> 0.95",
        "30m",
        "{{ $labels.ReplicaId }} has not speculated for half an hour",
        "{{ $value | humanizePercentage }} of its steps under policy {{ $labels.dsde_policy }} draft nothing: "
        "speculation does not pay for this traffic, or every request is past the draft's context.",
    ),
    Alert(
        "DsdeTelemetryLost",
        _LOST % _RULE_RATE,
        "> 0",
        "10m",
        "Telemetry is being lost",
        "{{ $value | humanize }} spans or data points per second do not reach the collector: it is gone, or slower "
        "than they come. Requests are not affected.",
    ),
)


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard, ready for import; it asks for its Prometheus data source."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dict.fromkeys(panel.row for panel in PANELS):
        panels.append({"type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        members = [panel for panel in PANELS if panel.row == row]
        panels += [_panel(panel, x=8 * (place % 3), y=y + 1 + 8 * (place // 3)) for place, panel in enumerate(members)]
        y += 1 + 8 * ((len(members) + 2) // 3)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "dsde",
        "title": "dsde",
        "tags": ["dsde", "ray", "vllm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "panels": panels,
    }


def alert_rules() -> dict[str, Any]:
    """The rule file, as Prometheus and a PrometheusRule's spec take it."""
    rules = [
        {
            "alert": alert.name,
            "expr": f"({alert.value}) {alert.comparison}",
            "for": alert.lasts,
            "labels": {"severity": "warning"},
            "annotations": {"summary": alert.summary, "description": alert.description},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "dsde", "rules": rules}]}


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=10_000)


def files() -> dict[str, str]:
    """Path below the folder and content of each file."""
    return {
        "dashboards/dsde.json": json.dumps(dashboard(), indent=2) + "\n",
        "alerts/dsde.yaml": _yaml(alert_rules()),
        "alerts/prometheus-rule.yaml": _yaml(_PROMETHEUS_RULE | {"spec": alert_rules()}),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        prog="python -m dsde.telemetry.monitoring",
        description="Write the Grafana dashboard and the Prometheus alert rules.",
        epilog="example: python -m dsde.telemetry.monitoring k8s",
    )
    parser.add_argument("folder", type=Path, help="where dashboards/ and alerts/ are written")
    folder = parser.parse_args(arguments).folder
    for name, content in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        print(path)


def _panel(panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend, "datasource": source}
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    main()
