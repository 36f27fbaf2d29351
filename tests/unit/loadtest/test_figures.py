from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.figures import COLUMNS, Slo, complaints, summaries, summarise
from loadtest.records import Record, read_records, write_records
from loadtest.report import PAGE, SUMMARY, write_comparison, write_report
from tests.unit.loadtest.conftest import FIGURES

SLO = Slo(ttft_ms=2000, tpot_ms=300)
Make = Callable[..., Record]


def test_a_record_s_times_are_those_of_the_field(record: Make) -> None:
    one = record(scheduled_s=0.5, started_s=0.6)
    assert one.late_ms == pytest.approx(100)
    assert one.ttft_ms == pytest.approx(400)
    # 8 tokens after the first in 2 s.
    assert one.tpot_ms == pytest.approx(250)
    assert one.e2e_ms == pytest.approx(2400)
    assert record(completion_tokens=1).tpot_ms is None
    assert record(error="timeout").e2e_ms is None


def test_sums_are_worked_by_hand(record: Make) -> None:
    other = {**FIGURES, "num_draft_tokens": 2, "num_accepted_draft_tokens": 1, "num_spec_steps": 1}
    other["dsde"] = {
        **FIGURES["dsde"],
        "steps": 6,
        "speculation_length": {"mean": 0.5, "max": 1, "limit": 8},
        "kld": {"mean": None},
        "stability": None,
        "straggler": {"wait_ms": 0.0},
        "replica": "b",
    }
    records = [
        record(),
        record(request_id="load-1", answer_id="load-1", protocol="grpc", started_s=1.0, first_token_s=5.0, end_s=6.0,
               completion_tokens=11, gaps_ms=[100.0], speculation=other),
        record(request_id="load-2", error="http 503", first_token_s=None, end_s=9.0, gaps_ms=[]),
    ]  # fmt: skip
    found = summarise(records, SLO)
    assert (found.requests, found.errors, found.incomplete) == (3, {"http 503": 1}, 0)
    assert found.ttft_ms is not None
    assert found.ttft_ms[0] == pytest.approx(2500)
    assert found.inter_token_ms is not None
    assert found.inter_token_ms[0] == pytest.approx(400)
    # 20 tokens of complete answers in 9 s; only the first keeps to 2 s.
    assert found.tokens_per_s == pytest.approx(20 / 9)
    assert found.goodput_per_s == pytest.approx(1 / 9)
    assert found.acceptance == pytest.approx(5 / 10)
    assert found.acceptance_length == pytest.approx(1 + 5 / 3)
    assert found.speculation_length == pytest.approx((4 * 2.0 + 6 * 0.5) / 10)
    assert (found.kld, found.stability) == (0.25, 0.75)
    assert found.straggler_wait_ms == pytest.approx(6)
    assert found.replicas == {"b": 1}


@pytest.mark.parametrize("slow", [{"first_token_s": 2.5}, {"end_s": 3.5}])
def test_goodput_asks_for_both_bounds(record: Make, slow: dict[str, float]) -> None:
    assert SLO.kept(record())
    assert not SLO.kept(record(**slow))
    assert not SLO.kept(record(error="cut"))


def test_rates_of_groups_add_up(record: Make) -> None:
    # Both last 3 s of the run's 12: 9 tokens each.
    records = [record(), record(workload="code", started_s=9.0, first_token_s=10.0, end_s=12.0)]
    found = {one.workload: one for one in summaries(records, SLO)}
    assert found["code"].tokens_per_s == found["chat"].tokens_per_s == pytest.approx(9 / 12)
    assert found["all"].tokens_per_s == pytest.approx(18 / 12)
    assert found["code"].goodput_per_s == pytest.approx(1 / 12)


def test_groups_are_all_protocols_classes_and_both(record: Make) -> None:
    records = [record(workload=name, protocol=protocol) for name in ("code", "chat") for protocol in ("http", "grpc")]
    assert [(one.workload, one.protocol, one.requests) for one in summaries(records, SLO)] == [
        ("all", "all", 4),
        ("all", "grpc", 2),
        ("all", "http", 2),
        ("chat", "all", 2),
        ("code", "all", 2),
        ("chat", "grpc", 1),
        ("chat", "http", 1),
        ("code", "grpc", 1),
        ("code", "http", 1),
    ]
    assert [(one.workload, one.protocol) for one in summaries([record()], SLO)] == [("all", "all")]


def test_complaints_name_errors_and_missing_figures(record: Make) -> None:
    assert complaints([record()]) == []
    lines = complaints([record(), record(error="http 503", detail="full"), record(speculation=None)])
    assert lines == [
        "1 of 3 requests failed: http 503; load-0: full",
        "1 answers came without speculative_decoding, the first was load-0 over http",
        "1 answers came without dsde, the first was load-0 over http",
    ]
    assert complaints([]) == ["no request was answered"]
    # A bare vLLM owes no figures of speculation, but all others.
    assert complaints([record(speculation=None)], bare=True) == []
    assert len(complaints([record(speculation=None, finish_reason=None)], bare=True)) == 1


def test_an_answer_to_another_request_lacks_its_id(record: Make) -> None:
    assert record(answer_id="chatcmpl-load-7").missing() == ["request_id"]
    assert record(finish_reason="").missing() == ["finish_reason"]


def test_records_survive_their_file(record: Make, tmp_path: Path) -> None:
    records = [record(), record(error="timeout", detail="no end", first_token_s=None, speculation=None)]
    write_records(tmp_path / "records.jsonl", records)
    assert read_records(tmp_path) == records == read_records(tmp_path / "records.jsonl")
    assert json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])["class"] == "chat"
    (tmp_path / "records.jsonl").write_text('{"class": "chat"}\n')
    with pytest.raises(ValueError, match="line 1 is no record of a load test"):
        read_records(tmp_path)
    with pytest.raises(ValueError, match="accepted: a directory that --report wrote"):
        read_records(tmp_path / "elsewhere")


def test_the_page_needs_nothing_else_and_shows_the_figures(record: Make, tmp_path: Path) -> None:
    records = [
        record(),
        record(workload="<code>", protocol="grpc", started_s=1.0, end_s=4.0),
        record(error="http 503", detail="full"),
    ]
    page = write_report(tmp_path / "new", records, SLO, {"profile": "steady", "input": None})
    text = page.read_text()
    assert page == tmp_path / "new" / PAGE
    assert text.count("<svg") == text.count("</svg>") == 4
    for column in COLUMNS:
        assert text.count(f"<th>{column.title}</th>") == 2
    assert text.index("<h2>Pictures</h2>") < text.index("<h2>Each class over each protocol</h2>")
    for link in ("<script", "<link", "src=", 'href="http', "@import", "url(http"):
        assert link not in text
    # Pictures on one page must not share ids.
    ids = [part.split('"')[0] for part in text.split('<clipPath id="')[1:]]
    assert len(set(ids)) == len(ids) > 0
    assert "&lt;code&gt;" in text
    assert "<code>" not in text
    assert "1 of 3 requests failed: http 503" in text
    assert "<td>0.250</td>" in text
    assert "profile steady" in text
    tree = json.loads((tmp_path / "new" / SUMMARY).read_text())
    assert tree["summaries"][0]["requests"] == 3
    assert len(read_records(tmp_path / "new")) == 3


def test_a_run_without_one_answer_still_has_its_page(record: Make, tmp_path: Path) -> None:
    failed = record(error="connection", first_token_s=None, speculation=None, completion_tokens=None, gaps_ms=[])
    text = write_report(tmp_path, [failed], SLO, {}).read_text()
    assert "no request was answered" in text


def test_two_runs_stand_side_by_side(record: Make, tmp_path: Path) -> None:
    first = [record()]
    second = [replace(one, first_token_s=2.0) for one in first]
    pairs = [(summarise(first, SLO), summarise(second, SLO))]
    text = write_comparison(tmp_path, {"a": first, "b": second}, pairs, SLO).read_text()
    assert "<td>TTFT ms</td><td>1000 / 1000 / 1000</td><td>2000 / 2000 / 2000</td><td>2.00 / 2.00 / 2.00</td>" in text
    assert text.count("<svg") == 4
