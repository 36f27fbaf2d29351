from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from dsde import top
from dsde.cli import main

EXPOSITION = """\
# HELP ray_dsde_requests_running running
# TYPE ray_dsde_requests_running gauge
ray_dsde_requests_running{ReplicaId="aaaa1111",gen_ai_request_model="embedded",WorkerId="1"} 3.0
ray_dsde_requests_running{ReplicaId="bbbb",gen_ai_request_model="embedded",WorkerId="2"} 0.0
# TYPE ray_dsde_goodput gauge
ray_dsde_goodput{ReplicaId="aaaa1111",gen_ai_request_model="embedded"} 41.25
ray_dsde_recent_acceptance_rate{ReplicaId="aaaa1111",gen_ai_request_model="embedded"} 0.625
ray_dsde_recent_speculation_length{ReplicaId="aaaa1111",gen_ai_request_model="embedded"} 3.25
ray_dsde_recent_kld{ReplicaId="aaaa1111",gen_ai_request_model="embedded"} 0.5125
ray_dsde_recent_stability{ReplicaId="aaaa1111",gen_ai_request_model="embedded"} 1.0
ray_dsde_recent_straggler_share{ReplicaId="aaaa1111",gen_ai_request_model="embedded"} 0.125
ray_dsde_recent_off_share{ReplicaId="aaaa1111",gen_ai_request_model="embedded"} 1.0
ray_dsde_requests_waiting{ReplicaId="aaaa1111",gen_ai_request_model="embedded"} 12.0
ray_something_else{ReplicaId="cccc"} 1.0
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(EXPOSITION.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_one_table_with_a_row_for_each_replica(endpoint: str) -> None:
    console = Console(width=80, record=True)
    assert top.run(endpoint, once=True, interval_s=2, console=console) == 0
    lines = console.export_text().splitlines()
    assert [line.split() for line in lines if "embedded" in line] == [
        ["aaaa1111", "embedded", "3", "12", "41.2", "3.25", "62%", "0.512", "100%", "12%", "100%"],
        ["bbbb", "embedded", "0", "-", "-", "-", "-", "-", "-", "-", "-"],
    ]


def test_without_a_url_ray_s_own_list_is_read(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = endpoint.removeprefix("http://")
    (tmp_path / "list.json").write_text(f'[{{"labels": {{"job": "ray"}}, "targets": ["127.0.0.1:9", "{target}"]}}]')
    monkeypatch.setattr(top, "_DISCOVERY", tmp_path / "list.json")
    assert [row.replica_id for row in top.replicas(top.scrape(top.endpoints(None)))] == ["aaaa1111", "bbbb"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--url", "http://127.0.0.1:9/metrics"], "nothing answers; start `dsde serve`"),
        (["--url", "here"], "--url here: accepted: the Prometheus endpoint"),
        (["--interval", "0"], "--interval 0: accepted: 0.5 seconds or more"),
        ([], "no Ray runs on this machine"),
    ],
)
def test_what_cannot_work_is_told_in_a_line(
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(top, "_DISCOVERY", tmp_path / "none.json")
    assert main(["top", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_an_endpoint_without_replicas_says_what_may_be_wrong(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_COLUMNS", {})
    with pytest.raises(RuntimeError, match="no engine replica shows up"):
        top.run(endpoint, once=True, interval_s=2)
