from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsde.config import from_values
from dsde.engine import plugin
from loadtest.against import FIGURES, Versus, _in_turn, ours, versus, vllm
from loadtest.exchange import Failure
from loadtest.figures import Slo, summarise
from loadtest.records import Record
from loadtest.server import Server

SLO = Slo(1000, 100)


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "model_paths", lambda config: ("/models/target", "/models/draft"))


def test_a_bare_vllm_has_the_engine_arguments_and_nothing_of_ours(tmp_path: Path) -> None:
    config = from_values({"engine": {"max_num_seqs": 7}, "model": {"dtype": "float32"}})
    server = vllm(config, "vllm", tmp_path)
    assert server.command[1:3] == ["serve", "/models/target"]
    assert flag(server.command, "--max-num-seqs") == "7"
    assert flag(server.command, "--dtype") == "float32"
    assert flag(server.command, "--served-model-name") == "embedded"
    assert not [word for word in server.command if "dsde" in word.lower() or "specul" in word]
    assert re.fullmatch(r"http://127.0.0.1:\d+", server.url)


def test_vllm_can_speculate_by_itself(tmp_path: Path) -> None:
    server = vllm(from_values({}), "vllm:3", tmp_path)
    assert json.loads(flag(server.command, "--speculative-config")) == {
        "method": "draft_model",
        "model": "/models/draft",
        "draft_sample_method": "probabilistic",
        "num_speculative_tokens": 3,
    }
    assert "--scheduler-cls" not in server.command


def test_vllm_can_have_the_plugin(tmp_path: Path) -> None:
    server = vllm(from_values({"speculation": {"policy": "static"}}), "vllm:dsde", tmp_path)
    assert flag(server.command, "--scheduler-cls") == "dsde.engine.scheduler.DsdeScheduler"
    assert json.loads(flag(server.command, "--additional-config"))["dsde"]["policy"] == "static"


def test_ours_is_one_replica_of_the_same_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSDE_SERVING__REPLICAS", "5")
    config = from_values({"serving": {"replicas": 4}, "speculation": {"policy": "static"}})
    server = ours(config, tmp_path)
    tree = json.loads(Path(flag(server.command, "--config")).read_text())
    assert (tree["serving"]["replicas"], tree["serving"]["port"], tree["serving"]["grpc_port"]) == (1, 0, 0)
    assert tree["speculation"]["policy"] == "static"
    assert "DSDE_SERVING__REPLICAS" not in server._environment


def test_ours_and_the_other_are_compared_within_a_round(record: Callable[..., Record]) -> None:
    # The machine is half as fast in the second round; the ratio is 2 in both.
    rounds = [
        {"dsde": [record(first_token_s=1.0 * slow)], "vllm": [record(first_token_s=0.5 * slow)]} for slow in (1, 2)
    ]
    assert versus(rounds, SLO)["TTFT p50 ms"] == pytest.approx((2, 750, 2, 2))
    assert versus(rounds, SLO)["tokens/s"] == pytest.approx((1, 0, 1, 1))
    rounds[1]["vllm"] = [record(first_token_s=None, error="timeout")]
    assert versus(rounds, SLO)["TTFT p50 ms"] is None


@pytest.mark.parametrize(
    ("title", "within", "beyond"),
    [
        ("tokens/s", (0.97, -9.0), (0.969, 0.0)),
        ("TTFT p50 ms", (3.0, 5.0), (1.0, 5.1)),
        ("inter-token p99 ms", (1.05, 9.0), (1.051, 0.0)),
    ],
)
def test_the_goals_are_of_throughput_first_token_and_slow_gaps(
    title: str, within: tuple[float, float], beyond: tuple[float, float]
) -> None:
    holds = {one.title: one.holds for one in FIGURES}[title]
    assert holds is not None
    assert holds(Versus(*within, 1, 1))
    assert not holds(Versus(*beyond, 1, 1))


_WEB = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"at  http://127.0.0.1:{server.server_port}/v1", flush=True)
server.serve_forever()
"""


def test_a_server_is_up_inside_its_block_and_gone_after_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WEB]
    server = Server("web", command, {}, tmp_path / "log", announced=r"at\s+(\S+)/v1")
    with server:
        process = server._process
        assert process is not None
        assert process.poll() is None
        assert re.fullmatch(r"http://127.0.0.1:\d+", server.url)
    assert process.poll() is not None


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no memory'); sys.exit(3)"]
    with pytest.raises(Failure, match="web ended with status 3: no memory"):
        Server("web", command, {}, tmp_path / "log", url="http://127.0.0.1:1").__enter__()


def test_rounds_of_a_server_follow_each_other_in_its_report(record: Callable[..., Record]) -> None:
    one = [record(scheduled_s=0.0, started_s=0.0, first_token_s=0.5, end_s=2.0)]
    run = _in_turn([one, one, one])
    assert [each.started_s for each in run] == [0.0, 2.0, 4.0]
    assert [each.first_token_s for each in run] == [0.5, 2.5, 4.5]
    assert summarise(run, SLO).tokens_per_s == pytest.approx(summarise(one, SLO).tokens_per_s)
    assert summarise(run, SLO).ttft_ms == pytest.approx(summarise(one, SLO).ttft_ms)
