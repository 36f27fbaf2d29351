"""The client against real servers of both protocols, whose answers are made up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from loadtest.drive import CANCELLED, Drive
from loadtest.exchange import Failure
from loadtest.http import HttpSender
from loadtest.records import Record
from loadtest.rpc import GrpcSender
from tests.unit.loadtest.conftest import FIGURES, Handler, Servicer, request


async def driven(senders: dict[str, Any], *requests: Any, timeout_s: float = 20.0, **more: Any) -> list[Record]:
    drive = Drive(senders, timeout_s)
    try:
        await drive.run(requests, **more)
    finally:
        for sender in senders.values():
            await sender.close()
    return drive.records


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
async def test_http_sends_the_whole_request_and_reads_the_whole_answer(url: str, suffix: str) -> None:
    asked = request(policy="static", ignore_eos=True)
    [record] = await driven({"http": HttpSender(url + suffix, "secret")}, asked)
    assert Handler.seen == [
        {
            "id": "load-0",
            "key": "Bearer secret",
            "body": {
                "messages": [{"role": "user", "content": "Why?"}],
                "max_completion_tokens": 9,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "temperature": 0.5,
                "seed": 3,
                "ignore_eos": True,
                "vllm_xargs": {"dsde_policy": "static"},
            },
        }
    ]
    assert (record.answer_id, record.finish_reason, record.error) == ("chatcmpl-load-0", "length", None)
    assert (record.prompt_tokens, record.completion_tokens, record.received_tokens) == (3, 5, 5)
    assert record.speculation == FIGURES
    # Three messages bring tokens, the first chunk only the role.
    assert len(record.gaps_ms) == 2
    assert record.missing() == []
    assert record.first_token_s is not None
    assert record.started_s <= record.first_token_s <= record.end_s


async def test_grpc_sends_the_whole_request_and_reads_the_whole_answer(rpc: tuple[str, Servicer]) -> None:
    address, servicer = rpc
    [record] = await driven({"grpc": GrpcSender(address)}, request(protocol="grpc", policy="static", ignore_eos=True))
    [seen] = servicer.seen
    assert (seen.request_id, seen.chat.messages[0].content, seen.speculation.policy) == ("load-0", "Why?", "static")
    sampling = seen.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.ignore_eos) == (9, 0.5, 3, True)
    assert (record.answer_id, record.finish_reason, record.error) == ("load-0", "length", None)
    assert (record.prompt_tokens, record.completion_tokens, record.received_tokens) == (3, 5, 5)
    assert record.dsde is not None
    assert (record.dsde["kld"]["mean"], record.dsde["steps"]) == (0.25, 4)
    assert len(record.gaps_ms) == 2
    assert record.missing() == []


async def test_both_protocols_share_a_run(url: str, rpc: tuple[str, Servicer]) -> None:
    requests = [request(protocol=one, name=f"load-{one}") for one in ("http", "grpc")]
    records = await driven({"http": HttpSender(url), "grpc": GrpcSender(rpc[0])}, *requests)
    assert {one.protocol: one.missing() for one in records} == {"http": [], "grpc": []}


@pytest.mark.parametrize(
    ("content", "kind", "detail"),
    [
        ("Full", "http 503", "queue is full"),
        ("Die", "stream", "engine away"),
        ("Cut", "cut", "the stream ended before its [DONE]"),
        ("Hang", "timeout", "no end within 0.2 s"),
    ],
)
async def test_http_names_what_went_wrong(url: str, content: str, kind: str, detail: str) -> None:
    [record] = await driven({"http": HttpSender(url)}, request(content), timeout_s=0.2 if kind == "timeout" else 20)
    assert (record.error, record.detail) == (kind, detail)
    assert record.e2e_ms is None
    assert record.received_tokens == {"Die": 4, "Cut": 5}.get(content, 0)


@pytest.mark.parametrize(
    ("content", "kind", "detail"),
    [
        ("Full", "grpc RESOURCE_EXHAUSTED", "queue is full"),
        ("Cut", "cut", "the stream ended before its usage"),
        ("Hang", "timeout", "no end within 0.2 s"),
    ],
)
async def test_grpc_names_what_went_wrong(rpc: tuple[str, Servicer], content: str, kind: str, detail: str) -> None:
    timeout_s = 0.2 if kind == "timeout" else 20
    [record] = await driven({"grpc": GrpcSender(rpc[0])}, request(content, "grpc"), timeout_s=timeout_s)
    assert (record.error, record.detail) == (kind, detail)


async def test_nobody_there_is_an_error_of_its_own() -> None:
    [record] = await driven({"http": HttpSender("http://127.0.0.1:1")}, request())
    assert record.error == "connection"
    [record] = await driven({"grpc": GrpcSender("127.0.0.1:1")}, request(protocol="grpc"))
    assert record.error == "grpc UNAVAILABLE"


async def test_arrivals_do_not_wait_for_answers(url: str) -> None:
    # Were it a closed loop, the second would leave when the first gives up.
    requests = [request("Hang", name="load-a"), request(at_s=0.05, name="load-b")]
    first, second = sorted(
        await driven({"http": HttpSender(url)}, *requests, timeout_s=1.0), key=lambda one: one.request_id
    )
    assert (first.error, second.error) == ("timeout", None)
    assert second.end_s < first.end_s
    assert 0 <= second.late_ms < 900


async def test_a_start_after_its_time_is_on_record(url: str) -> None:
    drive = Drive({"http": HttpSender(url)}, 20.0)

    async def hog() -> None:
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - the loop is held up, as by a client that is too slow

    await asyncio.gather(drive.run([request(at_s=0.05)]), hog())
    [record] = drive.records
    assert record.scheduled_s == 0.05
    assert record.late_ms > 150


async def test_patience_ends_what_is_under_way(rpc: tuple[str, Servicer]) -> None:
    address, servicer = rpc
    [record] = await driven({"grpc": GrpcSender(address)}, request("Hang", "grpc"), patience_s=0.3)
    assert record.error == CANCELLED
    await asyncio.wait_for(servicer.cancelled.wait(), 10)


async def test_an_answer_without_figures_lacks_them(url: str) -> None:
    [record] = await driven({"http": HttpSender(url)}, request("Bare"))
    assert record.error is None
    assert record.missing() == ["speculative_decoding", "dsde"]


async def test_without_counts_a_message_with_text_is_a_token(url: str) -> None:
    [record] = await driven({"http": HttpSender(url)}, request("Plain"))
    assert len(record.gaps_ms) == 1
    assert record.completion_tokens == 5


async def test_the_model_is_asked_for(url: str, rpc: tuple[str, Servicer]) -> None:
    http, grpc = HttpSender(url), GrpcSender(rpc[0])
    assert await http.model() == ("embedded", "/models/target")
    assert await grpc.model() == ("embedded", "")
    await http.close()
    await grpc.close()
    with pytest.raises(Failure, match=r"nothing answers at http://127.0.0.1:1: .*; start a server with `make run`"):
        await HttpSender("http://127.0.0.1:1").model()


async def test_what_the_client_cannot_do_is_a_failed_request_and_the_others_go_on(url: str) -> None:
    class Broken:
        def send(self, asked: Any, timeout_s: float) -> Any:
            raise KeyError("odd")

        async def close(self) -> None:
            pass

    records = await driven({"grpc": Broken(), "http": HttpSender(url)}, request(protocol="grpc"), request())
    assert sorted((one.protocol, one.error) for one in records) == [("grpc", "client"), ("http", None)]
