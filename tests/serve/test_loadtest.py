"""A short load test of the running application, over both protocols."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dsde.cli import main
from loadtest.records import read_records
from tests.serve.conftest import Served
from tests.serve.figures import check_figures


def test_a_mixed_run_has_no_failure_and_a_report_with_the_server_s_figures(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--url", served.url, "--address", served.address, "--api-key", served.key]
    # Fast enough for requests to overlap on any machine: one alone goes where its prefix is.
    load = ["--protocol", "mixed", "--rate", "8", "--duration", "3", "--seed", "1", "--max-tokens", "12"]
    assert main(["loadtest", *where, *load, "--report", str(tmp_path)]) == 0
    assert "FAILED" not in capsys.readouterr().err

    records = read_records(tmp_path)
    assert len(records) >= 16
    assert {(one.workload, one.protocol) for one in records} >= {("chat", "http"), ("chat", "grpc"), ("code", "http")}
    for one in records:
        assert (one.error, one.missing()) == (None, [])
        assert one.completion_tokens == one.received_tokens > 0
        dsde = check_figures({"speculative_decoding": one.speculation}, one.completion_tokens)
        assert dsde["policy"] == served.policy
        # The first token's message, then one a gap; only drafts make messages of several.
        assert 1 <= len(one.gaps_ms) + 1 <= one.completion_tokens

    total = json.loads((tmp_path / "summary.json").read_text())["summaries"][0]
    assert (total["requests"], total["errors"], total["incomplete"]) == (len(records), {}, 0)
    assert sum(total["replicas"].values()) == len(records)
    assert len(total["replicas"]) == 2
    assert total["tokens_per_s"] > 0
    shown = [f"{total['tokens_per_s']:.1f}"]
    # A policy that has learnt that drafts do not pay under this load drafts nothing.
    if any((one.speculation or {}).get("num_draft_tokens") for one in records):
        assert 0 < total["acceptance"] <= 1
        shown += [f"{total['acceptance']:.2f}", f"{total['kld']:.3f}"]
    else:
        assert total["acceptance"] is None
    page = (tmp_path / "report.html").read_text()
    for value in shown:
        assert f"<td>{value}</td>" in page


def test_the_highest_rate_is_found_on_the_application(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--url", served.url, "--address", served.address, "--api-key", served.key, "--protocol", "mixed"]
    load = ["--rate", "1", "--duration", "4", "--minutes", "0.2", "--max-tokens", "4", "--slo-ttft", "60000"]
    assert main(["loadtest", "--find-rate", *where, *load]) == 0
    found = re.search(r"highest rate with p95 TTFT up to 60000 ms: (\S+) requests/s", capsys.readouterr().out)
    assert found is not None
    assert float(found.group(1)) >= 1


def test_ours_and_a_vllm_server_answer_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--mix", "facts", "--rate", "1", "--duration", "4", "--max-tokens", "4", "--rounds", "1"]
    assert main(["loadtest", "--against", "vllm", *load, "--report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"TTFT p50 ms +[\d.]+ +[\d.]+ +[+-][\d.]+ +[\d.]+ ", out)
    ours, theirs = read_records(tmp_path / "dsde"), read_records(tmp_path / "vllm")
    assert [one.scheduled_s for one in ours] == [one.scheduled_s for one in theirs]
    assert [one.prompt_tokens for one in ours] == [one.prompt_tokens for one in theirs]
    for one in (*ours, *theirs):
        assert (one.error, one.completion_tokens, one.received_tokens) == (None, 4, 4)
    assert all(one.dsde for one in ours)
    assert not any(one.speculation for one in theirs)
