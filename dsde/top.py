"""`dsde top`: the replicas of a running application, live, from the Prometheus endpoint of its Ray nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

__all__ = ["Replica", "endpoints", "replicas", "run", "table"]

# Ray keeps this file for Prometheus; it names the endpoints of every node.
_DISCOVERY = Path("/tmp/ray/prom_metrics_service_discovery.json")
_TIMEOUT_S = 5.0
_LONGEST_ID = 12
_CAPTION = (
    "newest 10 s with work; SL: draft tokens per step\n"
    "stable: steps whose KLD had settled; off: steps without drafts\n"
    "straggle: decoding time waited for longer members of a batch"
)
_COLUMNS = {
    "run": ("ray_dsde_requests_running", "{:.0f}"),
    "wait": ("ray_dsde_requests_waiting", "{:.0f}"),
    "tok/s": ("ray_dsde_goodput", "{:.1f}"),
    "SL": ("ray_dsde_recent_speculation_length", "{:.2f}"),
    "accept": ("ray_dsde_recent_acceptance_rate", "{:.0%}"),
    "KLD": ("ray_dsde_recent_kld", "{:.3f}"),
    "stable": ("ray_dsde_recent_stability", "{:.0%}"),
    "straggle": ("ray_dsde_recent_straggler_share", "{:.0%}"),
    "off": ("ray_dsde_recent_off_share", "{:.0%}"),
}
"""Heading of each column: the metric it shows and how."""


@dataclass(slots=True)
class Replica:
    """An engine replica. values: by metric name; what was not measured yet is absent."""

    replica_id: str
    model: str = ""
    values: dict[str, float] = field(default_factory=dict)


def endpoints(url: str | None) -> list[str]:
    """The URLs to scrape: `url`, or those of every Ray node on record here.

    RuntimeError when nothing is on record, ValueError for a URL that is none.
    """
    if url is not None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(f"--url {url}: accepted: the Prometheus endpoint, as in http://127.0.0.1:8080/metrics")
        return [url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/metrics"]
    try:
        groups = json.loads(_DISCOVERY.read_text())
    except (OSError, ValueError):
        raise RuntimeError(
            "no Ray runs on this machine: start `dsde serve`, or give the Prometheus endpoint that it prints with --url"
        ) from None
    return [f"http://{target}/metrics" for group in groups for target in group["targets"]]


def scrape(urls: Sequence[str]) -> str:
    """What the endpoints that answer say. RuntimeError when none does."""
    texts: list[str] = []
    reasons: list[str] = []
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
        for url in urls:
            try:
                texts.append(client.get(url).raise_for_status().text)
            except httpx.HTTPError as error:
                reasons.append(f"{url}: {str(error) or type(error).__name__}")
    if not texts:
        raise RuntimeError(
            "nothing answers; start `dsde serve`, or give the endpoint that it prints with --url\n" + "\n".join(reasons)
        )
    return "\n".join(texts)


def replicas(text: str) -> list[Replica]:
    """The replicas in a Prometheus exposition, by id."""
    wanted = {metric for metric, _ in _COLUMNS.values()}
    lines = (line for line in text.splitlines() if line.partition("{")[0] in wanted)
    found: dict[str, Replica] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            replica_id = sample.labels.get("ReplicaId", "")
            replica = found.setdefault(replica_id, Replica(replica_id))
            replica.values[sample.name] = sample.value
            replica.model = replica.model or sample.labels.get("gen_ai_request_model", "")
    return sorted(found.values(), key=lambda replica: replica.replica_id)


def table(rows: Iterable[Replica]) -> Table:
    """One row for each replica."""
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, caption=_CAPTION)
    for heading in ("replica", "model"):
        shown.add_column(heading, no_wrap=True)
    for heading in _COLUMNS:
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = (_cell(row.values, metric, form) for metric, form in _COLUMNS.values())
        shown.add_row(row.replica_id[:_LONGEST_ID], row.model, *cells)
    return shown


def run(url: str | None, *, once: bool, interval_s: float, console: Console | None = None) -> int:
    """Show the table once, or every `interval_s` until Ctrl-C. Errors as in endpoints() and scrape()."""
    console = console or Console()
    if interval_s < 0.5:
        raise ValueError(f"--interval {interval_s:g}: accepted: 0.5 seconds or more")
    rows = _rows(url)
    if once:
        console.print(table(rows))
        return 0
    with Live(table(rows), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(interval_s)
            live.update(table(_rows(url)), refresh=True)


def _rows(url: str | None) -> list[Replica]:
    urls = endpoints(url)
    rows = replicas(scrape(urls))
    if not rows:
        raise RuntimeError(
            f"no engine replica shows up at {', '.join(urls)}: metrics come some seconds after a replica is ready, and "
            "not at all with telemetry.prometheus=false"
        )
    return rows


def _cell(values: Mapping[str, float], metric: str, form: str) -> str:
    return form.format(values[metric]) if metric in values else "-"
