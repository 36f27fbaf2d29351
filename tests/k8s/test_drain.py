"""When a worker may go: what dsde-drain makes of Serve's word, and of the node's metrics where Serve is silent."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from k8s import drain

NODE, OTHER = "0a" * 28, "0b" * 28
METRICS = """\
# TYPE ray_serve_num_ongoing_http_requests gauge
ray_serve_num_ongoing_http_requests{route="/",SessionName="s"} 1.0
ray_serve_num_ongoing_grpc_requests{Component="core"} 0.0
ray_serve_replica_processing_queries{deployment="EngineReplica"} 2.0
ray_serve_replica_processing_queries_total{deployment="EngineReplica"} 40.0
ray_serve_num_router_requests_total{route="/"} 7.0
"""


class Pages(ThreadingHTTPServer):
    """Answers a path with each of its texts in turn, the last one for good. headers: of the newest request."""

    def __init__(self, pages: dict[str, list[str]]) -> None:
        self.headers: dict[str, str] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                self.headers = {name.lower(): value for name, value in handler.headers.items()}
                texts = pages.get(handler.path, [])
                handler.send_response(200 if texts else 503)
                handler.end_headers()
                if texts:
                    handler.wfile.write((texts.pop(0) if len(texts) > 1 else texts[0]).encode())

            def log_message(handler, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def serving() -> Iterator[Any]:
    started: list[Pages] = []

    def serve(pages: dict[str, list[str]]) -> Pages:
        started.append(Pages(pages))
        threading.Thread(target=started[-1].serve_forever, args=(0.01,), daemon=True).start()
        return started[-1]

    yield serve
    for each in started:
        each.shutdown()
        each.server_close()


def told(*, replicas: tuple[str, ...], proxies: tuple[str, ...]) -> str:
    engines = {"replicas": [{"node_id": node} for node in replicas]}
    return json.dumps(
        {
            "applications": {"dsde": {"deployments": {"EngineReplica": engines}}},
            "proxies": {node: {} for node in proxies},
        }
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (told(replicas=(NODE, OTHER), proxies=(OTHER,)), True),
        (told(replicas=(OTHER,), proxies=(NODE, OTHER)), True),
        (told(replicas=(OTHER,), proxies=(OTHER,)), False),
        (json.dumps({"applications": {"dsde": {"deployments": {}}}, "proxies": {}}), True),
        (json.dumps({"applications": {}, "proxies": {}}), False),
    ],
    ids=["a replica stays", "a proxy drains", "neither", "nothing is told", "nothing is served"],
)
def test_a_node_is_in_use_while_serve_names_it(serving: Any, answer: str, expected: bool) -> None:
    head = serving({"/api/serve/applications/": [answer], "/metrics": [METRICS]})
    assert drain.in_use(head.url, head.url, NODE) is expected


def test_serve_is_asked_with_the_clusters_token(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    head = serving({"/api/serve/applications/": [told(replicas=(), proxies=())]})
    assert drain.in_use(head.url, head.url, NODE) is False
    assert head.headers["x-ray-authorization"] == "Bearer secret"


def test_without_the_head_requests_in_progress_count(serving: Any) -> None:
    node = serving({"/metrics": [METRICS]})
    assert drain.ongoing(node.url) == 3.0
    assert drain.in_use("http://127.0.0.1:9", node.url, NODE) is True
    idle = serving({"/metrics": [METRICS.replace(" 1.0", " 0.0").replace(" 2.0", " 0.0")]})
    assert drain.in_use("http://127.0.0.1:9", idle.url, NODE) is False


def test_a_node_that_has_ended_is_not_waited_for(serving: Any) -> None:
    assert drain.in_use("http://127.0.0.1:9", serving({}).url, NODE) is False


def test_a_pod_knows_its_node_by_its_raylet(tmp_path: Path) -> None:
    for pid, words in ((1, ["tini", "--"]), (7, ["raylet", "--store=/tmp", f"--node_id={NODE}"]), (9, ["agent", "é"])):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes("\0".join(words).encode("latin-1"))
    assert drain.own_node(tmp_path) == NODE


def test_it_asks_ray_once_and_returns_when_serve_has_left(
    serving: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    busy = told(replicas=(NODE,), proxies=())
    head = serving({"/api/serve/applications/": [busy, busy, told(replicas=(), proxies=(OTHER,))]})
    ray = tmp_path / "ray"
    ray.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n')
    ray.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setenv("DASHBOARD_PORT", str(head.server_port))
    monkeypatch.setenv("NODE_ID", NODE)
    waits: list[float] = []
    monkeypatch.setattr(drain, "sleep", waits.append)
    drain.main()
    assert waits == [drain.SETTLE_S, drain.POLL_S, drain.POLL_S]
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.startswith(f"drain-node --address 127.0.0.1:6379 --node-id {NODE} ")
    assert asked.endswith(f"--deadline-remaining-seconds {drain.DEADLINE_S}")
