from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsde.bench.replays import halves
from dsde.cli import main
from dsde.control.replay import COSTS, replay
from dsde.control.trace import Trace, synthesize

FLAT = "10,0,1"
"""A token costs nothing and a draft step a tenth of a verification."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    requests = []
    for temperature in (0.0, 1.0):
        made = synthesize(requests=8, rounds=10, acceptance=0.8, temperature=temperature, length=6, seed=1)
        for number, one in enumerate(made.requests):
            workload = ("code", "chat")[number % 2]
            requests.append(replace(one, request_id=f"{workload}-{number}-T{temperature:g}", workload=workload))
    file = tmp_path_factory.mktemp("traces") / "high.jsonl.gz"
    Trace(6, tuple(requests)).write(file)
    return file


def replayed(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    file = tmp_path / "out.json"
    assert main(["replay", *arguments, "--json", str(file)]) == 0
    cells: list[dict[str, Any]] = json.loads(file.read_text())["cells"]
    return cells


def of(cells: list[dict[str, Any]], **where: Any) -> dict[str, dict[str, Any]]:
    return {one["policy"]: one for one in cells if all(one[name] == value for name, value in where.items())}


def test_every_ratio_is_of_one_cell(recorded: Path, tmp_path: Path) -> None:
    costs = f"{FLAT};1,1,1"
    arguments = ("--policies", "static-1,static-4,goodput", "--batch", "1,4", "--tokens", "120", "--cost", costs)
    cells = replayed(tmp_path, str(recorded), *arguments)
    labels = ["autoregressive", "static-1", "static-4", "goodput", "oracle: acceptances", "oracle: chances"]
    assert len(cells) == 2 * 2 * 2 * len(labels)
    for cost, batch, temperature in ((c, b, t) for c in (FLAT, "1,1,1") for b in (1, 4) for t in (0.0, 1.0)):
        own = of(cells, trace="high", cost=cost, batch=batch, temperature=temperature, workload="mix")
        assert list(own) == labels
        speed = {policy: one["tokens_per_s"] for policy, one in own.items()}
        best = max(("static-1", "static-4"), key=speed.__getitem__)
        for policy, one in own.items():
            assert one["ratio_to_autoregressive"] == pytest.approx(speed[policy] / speed["autoregressive"])
            assert one["ratio_to_static_opt"] == pytest.approx(speed[policy] / speed[best])
            assert one["ratio_to_oracle"] == pytest.approx(speed[policy] / speed["oracle: acceptances"])
            assert one["ratio_to_oracle_chances"] == pytest.approx(speed[policy] / speed["oracle: chances"])
            assert one["is_static_opt"] == (policy == best)
            # All do the same work, but for the accepted drafts of the last step.
            assert policy.startswith("oracle") or 120 <= one["tokens"] < 120 + 7 * batch
    # Plain decoding: ten ms for one token, and for four.
    assert of(cells, cost=FLAT, batch=1)["autoregressive"]["tokens_per_s"] == pytest.approx(100.0)
    assert of(cells, cost=FLAT, batch=4)["autoregressive"]["tokens_per_s"] == pytest.approx(400.0)
    # Where tokens cost nothing a long draft pays, where a step of n costs 1 + n it does not.
    assert of(cells, cost=FLAT, batch=4, temperature=0.0)["static-4"]["is_static_opt"]
    assert of(cells, cost="1,1,1", batch=4, temperature=0.0)["static-1"]["is_static_opt"]


def test_the_figures_are_those_of_the_library(recorded: Path, tmp_path: Path) -> None:
    arguments = ("--policies", "static-2", "--batch", "2", "--tokens", "90", "--seed", "3", "--no-oracle")
    cells = replayed(tmp_path, str(recorded), *arguments, "--temperature", "0", "--workload", "code")
    trace = Trace.read(recorded)
    code = trace.only(i for i, one in enumerate(trace.requests) if (one.workload, one.temperature) == ("code", 0.0))
    outcome = replay("static", code, COSTS["cpu"], [(2, 90)], settings={"length": 2}, seed=3)
    [own] = [one for one in cells if one["policy"] == "static-2"]
    assert own["tokens_per_s"] == pytest.approx(outcome.tokens_per_s)
    assert own["mean_acceptance_length"] == pytest.approx(outcome.mean_acceptance_length)
    assert own["ratio_to_oracle"] is None


def test_a_moving_load_and_a_profiled_schedule(recorded: Path, tmp_path: Path) -> None:
    # Per token 4 ms and per draft step 1: worth it for one request, not for eight.
    arguments = ("--policies", "static-0,static-3,batch_schedule", "--load", "1,8", "--tokens", "160")
    cells = replayed(tmp_path, str(recorded), *arguments, "--cost", "20,6,4", "--temperature", "0")
    own = of(cells, batch="1-8")
    assert own["batch_schedule"]["ratio_to_static_opt"] > 1.0
    assert 0.0 < own["batch_schedule"]["off_share"] < 1.0
    assert own["oracle: acceptances"]["tokens"] is None
    assert own["oracle: acceptances"]["tokens_per_s"] > own["batch_schedule"]["tokens_per_s"]


def test_halves_hold_each_workload_and_no_request_twice(recorded: Path) -> None:
    trace = Trace.read(recorded)
    tuning, reported = halves(trace)
    ids = [[one.request_id for one in half.requests] for half in (tuning, reported)]
    assert sorted(ids[0] + ids[1]) == sorted(one.request_id for one in trace.requests)
    for half in (tuning, reported):
        assert [one.workload for one in half.requests].count("code") == 4


def test_what_was_learnt_before_is_kept(recorded: Path, tmp_path: Path) -> None:
    # A machine where drafting never pays: a controller that has served knows, a new one tries first.
    common = (str(recorded), "--policies", "goodput", "--batch", "4", "--tokens", "80", "--cost", "1,5,50")
    common = (*common, "--temperature", "0", "--no-oracle")
    cold = of(replayed(tmp_path, *common))["goodput"]
    warm = of(replayed(tmp_path, *common, "--warmup", "40"))["goodput"]
    held_out = of(replayed(tmp_path, *common, "--held-out"))["goodput"]
    assert cold["draft_steps"] > 0
    assert warm["draft_steps"] == held_out["draft_steps"] == 0


def test_static_stands_for_the_lengths_the_trace_holds(recorded: Path, tmp_path: Path) -> None:
    arguments = ("--policies", "static", "--batch", "1", "--tokens", "20", "--temperature", "0", "--no-oracle")
    cells = replayed(tmp_path, str(recorded), *arguments)
    assert [one["policy"] for one in cells] == ["autoregressive", *(f"static-{k}" for k in (1, 2, 3, 4, 6))]


def test_pictures_and_tables(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--policies", "static-1,paper", "--batch", "1,2", "--tokens", "30", "--temperature", "1")
    assert main(["replay", str(recorded), *arguments, "--plot", str(tmp_path / "pictures")]) == 0
    assert {one.name for one in (tmp_path / "pictures").iterdir()} == {"replay-high-T1.png", "replay-high-T1.svg"}
    captured = capsys.readouterr()
    assert "cpu costs, high, temperature 1, mix" in captured.out
    assert "all cells: geometric mean and worst cell" in captured.out
    assert "(10 of 10, about 0 s left)" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "best"], "--policies 'best' is unknown; accepted: autoregressive, static, static-K"),
        (
            ["--policies", "static-8"],
            "--policies 'static-8' with drafts of 6 tokens in the trace: speculation.settings",
        ),
        (["--temperature", "0.5"], "--temperature 0.5 is not recorded in trace high; accepted: 0, 1\n"),
        (["--workload", "math"], "--workload 'math' is unknown; accepted: all, mix, chat, code, separated by commas\n"),
        (["--cost", "fast"], "--cost 'fast' is not accepted: give cpu, gpu-mem, gpu-mixed or BASE,TOKEN,DRAFT"),
        (["--cost", "1,2"], "--cost '1,2' is not accepted"),
        (["--cost", "0,0,1"], "--cost '0,0,1' is not accepted"),
        (["--cost", "cpu;"], "--cost '' is not accepted"),
        (["--sync", "-1"], "--sync '-1' is not accepted: give a number from 0 up\n"),
        (["--batch", "0"], "--batch '0' is not accepted: give a whole number from 1 to 512\n"),
        (["--load", "1,4", "--batch", "1"], "--load 1,4 and --batch 1 exclude each other: give one of them\n"),
        (["--steps", "9", "--tokens", "9"], "--steps 9 and --tokens 9 exclude each other: give one of them\n"),
        (["--held-out", "--warmup", "9"], "--warmup 9 and --held-out exclude each other"),
        (["--signals", "--cost", "cpu"], "--cost has no part in --signals"),
        (["--signals", "--signal-length", "7"], "--signal-length '7' is not accepted: give a whole number from 1 to 6"),
        (["--signal-length", "2"], "--signal-length 2 goes with --signals\n"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: accepted: a file in a directory that exists\n"),
    ],
)
def test_a_bad_option_is_one_line(
    recorded: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recorded), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dsde: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json\n",
        b"[]\n",
        gzip.compress(b'{"format": "dsde-trace", "version": 1, "length": 2}\n' * 50)[:40],
        b'{"format": "dsde-trace", "version": 2, "length": 2}\n',
        b'{"format": "dsde-trace", "version": 1, "length": 2}\n{"id": "a"}\n',
        b'{"format": "dsde-trace", "version": 1, "length": 2}\n',
        b"\xff\xfe\n",
    ],
)
@pytest.mark.parametrize("name", ["bad.jsonl", "bad.jsonl.gz"])
def test_a_bad_file_is_one_line(content: bytes, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert main(["replay", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dsde: {file} ")
    assert error.count("\n") == 1


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "nowhere.jsonl"]) == 2
    assert capsys.readouterr().err == "dsde: nowhere.jsonl does not exist; accepted: a trace of `dsde bench --record`\n"


def test_two_files_of_one_name_keep_their_paths(recorded: Path, tmp_path: Path) -> None:
    other = tmp_path / recorded.name
    other.write_bytes(recorded.read_bytes())
    arguments = ("--policies", "static-1", "--batch", "1", "--tokens", "10", "--temperature", "0", "--no-oracle")
    cells = replayed(tmp_path, f"{recorded},{other}", *arguments)
    assert list(dict.fromkeys(one["trace"] for one in cells)) == [str(recorded), str(other)]
