"""The command line: options, what each mode does, and how it ends."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path

import pytest
import yaml

from dsde.cli import _parser, main
from loadtest.options import options
from loadtest.session import planned
from tests.unit.loadtest.conftest import Handler, Servicer

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mix sums", "--mix 'sums' is unknown; accepted: all, abstract, chat, code, "),
        ("--mix code=0", "--mix '0' is not accepted: give a number above 0"),
        ("--protocol udp", "--protocol 'udp' is unknown; accepted: http, grpc, mixed"),
        ("--profile wave", "--profile 'wave' is unknown; accepted: steady, ramp, burst, diurnal, trace"),
        ("--profile trace", "--profile trace: there are no times without an --input that has timestamps"),
        ("--rate 2 --peak 3", "--peak 3: a steady profile has none; accepted: with --profile ramp, burst, diurnal"),
        ("--profile ramp --rate 2 --peak 1", "--peak 1 is below --rate 2"),
        ("--rate -1", "--rate '-1' is not accepted: give a number above 0"),
        ("--rate 1000", "--rate and --duration would send 60000 requests; accepted: up to 20000 in one run"),
        ("--rate 0.001 --duration 1", "--duration 1: no request would be sent in it; raise it, or --rate"),
        ("--quick --find-rate", "--quick and --find-rate exclude each other: give one of them"),
        ("--find-rate --profile ramp", "--profile ramp and --find-rate exclude each other: the latter sends steadily"),
        ("--aiperf there --protocol grpc", "--protocol grpc and --aiperf exclude each other: AIPerf speaks HTTP"),
        (
            "--against tgi",
            "--against 'tgi' is unknown; accepted: vllm, vllm:K with K draft tokens a step, ",
        ),
        (
            "--against vllm --url http://a",
            "--against vllm starts both servers itself and asks them over HTTP: no --url",
        ),
        ("--find-rate --report there", "--report there and --find-rate exclude each other: the latter makes no report"),
        ("--pair bench", "settings are for the servers that --against starts; a running server has its own"),
        ("--compare nowhere nothing", "nowhere: accepted: a directory that --report wrote, or its records.jsonl"),
        ("--input nowhere", "--input nowhere: there is no such file"),
        ("--temperature 3", "--temperature '3' is not accepted: give a number from 0 to 2"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadtest", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"dsde: {message}")
    assert captured.err.count("\n") == 1


async def test_a_mixed_run_reports_and_ends_well(
    url: str, rpc: tuple[str, Servicer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["loadtest", "--quick", "--rate", "32", "--duration", "1", "--url", url, "--address", rpc[0]]
    # In a thread: the gRPC server of the test lives in this loop.
    assert await asyncio.to_thread(main, [*words, "--report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert str(tmp_path / "report.html") in captured.out
    assert "What the server says" in captured.out
    assert "FAILED" not in captured.err
    groups = {
        (one["workload"], one["protocol"]) for one in json.loads((tmp_path / "summary.json").read_text())["summaries"]
    }
    assert len(groups) == 1 + 2 + 8 + 16
    assert len(Handler.seen) + len(rpc[1].seen) == len((tmp_path / "records.jsonl").read_text().splitlines())


def trace(file: Path, *contents: str) -> str:
    lines = [
        {"timestamp": 50 * number, "output_length": 5, "messages": [{"role": "user", "content": content}]}
        for number, content in enumerate(contents)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("Full", "FAILED: 1 of 2 requests failed: http 503; load-"),
        ("Bare", "FAILED: 1 answers came without speculative_decoding, the first was load-"),
    ],
)
def test_a_failed_request_or_a_missing_figure_is_loud(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, line: str
) -> None:
    assert main(["loadtest", "--url", url, "--input", trace(tmp_path / "trace.jsonl", "Why?", content)]) == 1
    assert f"dsde loadtest: {line}" in capsys.readouterr().err
    assert [one["body"]["max_completion_tokens"] for one in Handler.seen] == [5, 5]


def test_nobody_there_says_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadtest", "--url", "http://127.0.0.1:1"]) == 1
    assert "nothing answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_the_highest_rate_is_printed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["loadtest", "--find-rate", "--rate", "64", "--duration", "0.2", "--minutes", "0.005", "--url", url]
    assert main([*words, "--slo-ttft", "20000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("highest rate with p95 TTFT up to 20000 ms: 64 requests/s (none that was tried failed")
    assert main([*words, "--slo-ttft", "0.001"]) == 1
    assert "FAILED: no rate holds p95 TTFT up to 0.001 ms" in capsys.readouterr().err


def test_aiperf_gets_its_file_and_its_line(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["loadtest", "--aiperf", str(tmp_path / "there"), "--url", f"{url}/v1", "--rate", "2", "--seed", "4"]
    assert main([*words, "--mix", "chat,code", "--max-tokens", "32", "--policy", "static"]) == 0
    told, line = capsys.readouterr().out.splitlines()
    file = tmp_path / "there" / "aiperf.jsonl"
    lines = [json.loads(one) for one in file.read_text().splitlines()]
    assert told == f"{file}: {len(lines)} requests"
    given = shlex.split(line)
    assert given[:2] == ["aiperf", "profile"]
    pairs = dict(zip(given[2::2], given[3::2], strict=False))
    assert (pairs["--model"], given[given.index("--tokenizer") + 1]) == ("embedded", "/models/target")
    for flag, value in (("--url", url), ("--input-file", str(file)), ("--request-count", str(len(lines)))):
        assert given[given.index(flag) + 1] == value
    assert Handler.seen == []

    # AIPerf sends what we would: the same chats at the same times, with the same options.
    chosen = options(_parser().parse_args([*words, "--mix", "chat,code", "--max-tokens", "32", "--policy", "static"]))
    for one, request in zip(lines, planned(chosen), strict=True):
        assert one["messages"] == request.prompt.messages
        assert one["timestamp"] == pytest.approx(1000 * request.at_s, abs=1)
        assert one["output_length"] == request.prompt.output_tokens <= 32
        assert one["extra"] == {**request.prompt.sampling, "vllm_xargs": {"dsde_policy": "static"}}
    assert any(len(one["messages"]) > 2 for one in lines)


def test_two_reports_are_compared(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        assert main(["loadtest", "--rate", "20", "--duration", "0.5", "--url", url, "--report", name]) == 0
    capsys.readouterr()
    assert main(["loadtest", "--compare", "a", "b", "--report", "both"]) == 0
    out = capsys.readouterr().out
    assert out.split()[3:9] == ["class", "protocol", "figure", "a", "b", "ratio"]
    assert "speculation length" in out
    assert (tmp_path / "both" / "report.html").read_text().count("<svg") == 4


def test_the_job_s_command_is_one_that_is_accepted() -> None:
    claim, job = yaml.safe_load_all((ROOT / "loadtest" / "job.yaml").read_text())
    assert (job["kind"], job["apiVersion"]) == ("Job", "batch/v1")
    [volume] = [one for one in job["spec"]["template"]["spec"]["volumes"] if one["name"] == "reports"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    program, *arguments = [*container["command"], *container["args"]]
    assert program == "dsde"
    chosen = options(_parser().parse_args(arguments))
    assert chosen.protocols == ("http", "grpc")
    assert chosen.profile is not None
    assert chosen.report is not None
    mounts = [Path(one["mountPath"]) for one in container["volumeMounts"]]
    assert any(chosen.report.is_relative_to(mount) for mount in mounts)
