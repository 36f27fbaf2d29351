"""Telemetry of the running application: spans and metrics as a collector and a Prometheus see them."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from dsde.telemetry.monitoring import ALERTS, PANELS, RATE
from tests.collector import Collector, Span
from tests.serve.conftest import Served

PATIENCE_S = 60
PARENT_ID = "b7ad6b7169203331"
SECRET = "xylophone"
PAPER: dict[str, Any] = {"vllm_xargs": {"dsde_policy": "paper"}}


def chat(web: httpx.Client, served: Served, headers: dict[str, str] | None = None, **wanted: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Write a story about a {SECRET}."}
    body = {"model": served.model, "messages": [message], "max_tokens": 32, "temperature": 0, **wanted}
    answer = web.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def over_http(served: Served, traceparent: str) -> dict[str, Any]:
    """Ask, and what the span of the request is to say of the answer."""
    with served.web(300) as web:
        answer = chat(web, served, {"traceparent": traceparent}, **PAPER)
    assert "dsde_events" not in str(answer)
    dsde = answer["metrics"]["speculative_decoding"]["dsde"]
    return {
        "gen_ai.response.id": answer["id"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
        "dsde.policy": dsde["policy"],
        "dsde.kld.mean": dsde["kld"]["mean"],
    }


def over_grpc(served: Served, traceparent: str) -> dict[str, Any]:
    """The same, of a stream over gRPC."""
    message = pb.ChatMessage(role="user", content=f"Write a story about a {SECRET}.")
    sampling = pb.SamplingParams(max_tokens=32, temperature=0)
    speculation = pb.SpeculationOptions(policy="paper")
    request = pb.GenerateRequest(chat=pb.Chat(messages=[message]), sampling=sampling, speculation=speculation)
    with served.channel() as channel:
        stream = pb_grpc.InferenceStub(channel).GenerateStream(
            request, timeout=300, metadata=(("traceparent", traceparent),)
        )
        *_, last = stream
    return {
        "gen_ai.response.id": f"chatcmpl-{last.request_id}",
        "gen_ai.usage.output_tokens": last.usage.completion_tokens,
        "gen_ai.usage.input_tokens": last.usage.prompt_tokens,
        "gen_ai.response.finish_reasons": [pb.FinishReason.Name(last.finish_reason).rpartition("_")[2].lower()],
        "dsde.policy": last.speculation.dsde.policy,
        "dsde.kld.mean": last.speculation.dsde.kld.mean,
    }


@pytest.fixture(scope="module")
def traffic(served: Served) -> int:
    """Enough requests for every metric to have moved on both replicas; how many."""
    kinds: list[dict[str, Any]] = [
        PAPER,
        {"temperature": 1.0},
        {"vllm_xargs": {"dsde_policy": "static", "dsde_max_length": 3}},
        {"vllm_xargs": {"dsde_policy": "autoregressive"}},
    ]
    with (
        served.web(300) as web,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(lambda number: chat(web, served, **kinds[number % len(kinds)]), range(16)))
    return 16


def scrape(served: Served) -> dict[str, list[Any]]:
    text = httpx.get(served.metrics, trust_env=False, timeout=30).text
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


@pytest.mark.parametrize("ask", [over_http, over_grpc])
def test_a_request_is_one_tree_of_spans(
    served: Served, received: Collector, ask: Callable[[Served, str], dict[str, Any]]
) -> None:
    trace_id = secrets.token_hex(16)
    # Nobody wants spans of the first one.
    unwanted = ask(served, f"00-{secrets.token_hex(16)}-{PARENT_ID}-00")
    expected = ask(served, f"00-{trace_id}-{PARENT_ID}-01")

    def named(part: str) -> list[Span]:
        return [span for span in received.trace(trace_id) if part in span.name]

    parts = ("proxy", "OpenAIIngress", "chat embedded", "route_to_replica EngineReplica", "llm_request")
    received.wait(lambda: all(map(named, parts)), PATIENCE_S, "the spans of a request")
    time.sleep(1)
    spans = {span.span_id: span for span in received.trace(trace_id)}
    assert unwanted["gen_ai.response.id"].removeprefix("chatcmpl-") not in str(received.spans)
    roots = [span for span in spans.values() if span.parent_id not in spans]
    assert {span.parent_id for span in roots} == {PARENT_ID}, [s.name for s in spans.values()]

    def ancestors(span: Span) -> list[str]:
        found = []
        while (parent := spans.get(span.parent_id)) is not None:
            found.append(parent.name)
            span = parent
        return found

    (engine,) = named("llm_request")
    (request,) = named("chat embedded")
    assert "chat embedded" in ancestors(engine), ancestors(engine)
    assert any("replica_handle_request EngineReplica" in name for name in ancestors(engine))
    assert any("route_to_replica EngineReplica" in name for name in ancestors(engine))
    assert any("OpenAIIngress" in name for name in ancestors(request))

    assert {name: request.attributes[name] for name in expected} == expected
    events = [name for name, _, _ in request.events]
    assert events[0] in ("dsde.speculation.on", "dsde.speculation.off")
    assert "dsde.calibration.done" in events
    assert all(request.start <= at <= request.end for _, at, _ in request.events)
    assert SECRET not in str(received.spans)


def test_metrics_arrive_over_otlp_from_both_replicas(traffic: int, received: Collector) -> None:
    wanted = {"gen_ai.server.request.duration", "dsde.kld", "dsde.steps", "dsde.goodput", "dsde.straggler.ratio"}
    received.wait(lambda: all(len(received.instances.get(one, ())) == 2 for one in wanted), PATIENCE_S, "metrics")
    assert received.services == {"dsde"}


def test_one_scrape_shows_ours_and_vllm_s_of_both_replicas(traffic: int, served: Served) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        families = scrape(served)
        counted = [
            s for s in families.get("ray_gen_ai_server_request_duration_seconds", []) if s.name.endswith("count")
        ]
        if sum(sample.value for sample in counted) >= traffic or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert sum(sample.value for sample in counted) >= traffic, sorted(families)
    assert len({sample.labels["ReplicaId"] for sample in counted}) == 2
    policies = {sample.labels["dsde_policy"] for sample in families["ray_dsde_speculation_length"]}
    assert policies >= {served.policy, "paper", "static", "autoregressive"}
    assert len({sample.labels["ReplicaId"] for sample in families["ray_vllm_generation_tokens"]}) == 2


@pytest.fixture(scope="module")
def prometheus(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the application's endpoint every second."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian: apt install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    target = served.metrics.removeprefix("http://").removesuffix("/metrics")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: ray, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
        "log.level": "warn",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [binary, *(f"--{name}={value}" for name, value in flags.items())], stdout=log, stderr=log
        )
    try:
        with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=30) as client:
            deadline = time.monotonic() + PATIENCE_S
            while not _ready(client):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, "prometheus does not get ready"
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_every_expression_of_dashboard_and_alerts_returns_data(
    prometheus: httpx.Client, traffic: int, served: Served
) -> None:
    expressions = [query for panel in PANELS for query, _ in panel.queries] + [alert.value for alert in ALERTS]
    stopped = threading.Event()

    def load(number: int) -> None:
        kinds: list[dict[str, Any]] = [PAPER, {"temperature": 1.0}, {"vllm_xargs": {"dsde_policy": "static"}}]
        with served.web(300) as web:
            while not stopped.is_set():
                chat(web, served, **kinds[number], max_tokens=16)

    def empty() -> list[str]:
        return [expression for expression in expressions if not numbers(expression)]

    def numbers(expression: str) -> list[float]:
        answer = prometheus.get(
            "/api/v1/query", params={"query": expression.replace(RATE, "1m").replace("[5m]", "[1m]")}
        )
        assert answer.status_code == 200, (expression, answer.text)
        values = [float(one["value"][1]) for one in answer.json()["data"]["result"]]
        return [value for value in values if math.isfinite(value)]

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(load, number) for number in range(3)]
        deadline = time.monotonic() + PATIENCE_S
        try:
            while (missing := empty()) and time.monotonic() < deadline:
                time.sleep(1)
        finally:
            stopped.set()
        for one in running:
            one.result()
    assert missing == []


def test_top_shows_both_replicas(traffic: int, served: Served) -> None:
    command = [sys.executable, "-m", "dsde.cli", "top", "--once", "--url", served.metrics]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "80"})
    assert shown.returncode == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines() if "embedded" in line]
    assert len(rows) == 2, shown.stdout
    for row in rows:
        running, waiting, speed, length, acceptance, kld, stability, stragglers, off = row[2:]
        assert min(int(running), int(waiting)) >= 0
        assert float(speed) >= 0
        assert 0 < float(length) <= 8
        assert float(kld) > 0
        for share in (acceptance, stability, stragglers, off):
            assert 0 <= int(share.removesuffix("%")) <= 100
