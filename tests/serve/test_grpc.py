"""The gRPC service as a client sees it, beside HTTP on the same engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import psutil
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from ray.serve.handle import DeploymentHandle

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.serve.conftest import ANSWER_TIMEOUT_S, Served
from tests.serve.figures import check_figures
from tests.serve.fleet import seconds_until, unfinished

COUNT = "One, two, three,"
QUESTION = pb.Chat(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])
# Lengths that follow the clock may flip a tie of bfloat16, and with it the text.
STATIC = pb.SpeculationOptions(policy="static")
STATIC_BODY = {"temperature": 0, "vllm_xargs": {"dsde_policy": "static"}}
ENDLESS = pb.GenerateRequest(prompt=COUNT, sampling=pb.SamplingParams(max_tokens=1500, ignore_eos=True))


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    channel = served.channel(("grpc.max_send_message_length", -1))
    yield channel
    channel.close()


@pytest.fixture
def inference(channel: grpc.Channel) -> pb_grpc.InferenceStub:
    return pb_grpc.InferenceStub(channel)


def generate(inference: pb_grpc.InferenceStub, **wanted: Any) -> pb.GenerateResponse:
    return inference.Generate(pb.GenerateRequest(**{"speculation": STATIC, **wanted}), timeout=ANSWER_TIMEOUT_S)


def greedy(**more: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**{"temperature": 0, "max_tokens": 16, **more})


def checked(answer: pb.GenerateResponse) -> pb.Dsde:
    stats = MessageToDict(
        answer.speculation, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    check_figures({"speculative_decoding": stats}, answer.usage.completion_tokens)
    return answer.speculation.dsde


def test_text_and_its_token_ids_give_http_s_answer(
    inference: pb_grpc.InferenceStub, web: httpx.Client, served: Served
) -> None:
    ids = web.post("/tokenize", json={"prompt": COUNT}).json()["tokens"]
    body = {"prompt": COUNT, "max_tokens": 16, "return_token_ids": True, **STATIC_BODY}
    (choice,) = web.post("/v1/completions", json=body).json()["choices"]
    by_text = generate(inference, prompt=COUNT, sampling=greedy())
    by_ids = generate(inference, prompt_token_ids=pb.TokenIds(ids=ids), sampling=greedy())
    for answer in (by_text, by_ids):
        assert (answer.text, list(answer.token_ids)) == (choice["text"], choice["token_ids"])
        assert (answer.model, answer.finish_reason) == (served.model, pb.FINISH_REASON_LENGTH)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 16)
        assert checked(answer).policy == "static"


def test_a_chat_gives_http_s_answer(inference: pb_grpc.InferenceStub, web: httpx.Client) -> None:
    messages = [{"role": one.role, "content": one.content} for one in QUESTION.messages]
    body = {"messages": messages, "max_tokens": 16, **STATIC_BODY}
    plain = web.post("/v1/chat/completions", json=body).json()
    answer = generate(inference, chat=QUESTION, sampling=greedy(), request_id="mine")
    assert answer.text == plain["choices"][0]["message"]["content"]
    assert answer.usage.prompt_tokens == plain["usage"]["prompt_tokens"]
    assert answer.request_id == "mine"
    checked(answer)


def test_a_stream_joins_to_the_whole_answer(inference: pb_grpc.InferenceStub) -> None:
    request = pb.GenerateRequest(chat=QUESTION, sampling=greedy(max_tokens=24, logprobs=2), speculation=STATIC)
    whole = inference.Generate(request, timeout=ANSWER_TIMEOUT_S)
    *others, last = messages = list(inference.GenerateStream(request, timeout=ANSWER_TIMEOUT_S))
    assert len(messages) > 2
    assert "".join(message.text for message in messages) == whole.text
    assert [token for message in messages for token in message.token_ids] == list(whole.token_ids)
    joined = [place.chosen.token_id for message in messages for place in message.logprobs]
    assert joined == [place.chosen.token_id for place in whole.logprobs]
    assert not any(message.HasField("usage") or message.finish_reason for message in others)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.finish_reason == whole.finish_reason
    checked(last)


def test_every_token_has_its_log_probability(inference: pb_grpc.InferenceStub) -> None:
    answer = generate(inference, prompt=COUNT, sampling=greedy(logprobs=2))
    assert [place.chosen.token_id for place in answer.logprobs] == list(answer.token_ids)
    assert "".join(place.chosen.text for place in answer.logprobs) == answer.text
    for place in answer.logprobs:
        first, second = place.top
        # Two tokens may share the first place.
        assert place.chosen in place.top
        assert place.chosen.logprob == first.logprob
        assert second.logprob <= first.logprob <= 0
    bare = generate(inference, prompt=COUNT, sampling=greedy(logprobs=0))
    assert [len(place.top) for place in bare.logprobs] == [0] * 16


def test_a_stop_string_ends_the_answer_and_is_named(inference: pb_grpc.InferenceStub) -> None:
    whole = generate(inference, prompt=COUNT, sampling=greedy())
    stop = whole.text[8:12]
    answer = generate(inference, prompt=COUNT, sampling=greedy(stop=[stop]))
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert (answer.finish_reason, answer.stop) == (pb.FINISH_REASON_STOP, stop)
    token = whole.token_ids[3]
    answer = generate(inference, prompt=COUNT, sampling=greedy(stop_token_ids=[token]))
    assert (answer.finish_reason, answer.stop_token_id) == (pb.FINISH_REASON_STOP, token)


@pytest.mark.parametrize("temperature", [0, 1])
def test_structure_is_kept(inference: pb_grpc.InferenceStub, temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99}},
        "required": ["capital", "people"],
        "additionalProperties": False,
    }
    more = {"temperature": temperature, "seed": 7, "max_tokens": 80}
    fact = json.loads(generate(inference, chat=QUESTION, sampling=greedy(json_schema=json.dumps(schema), **more)).text)
    assert sorted(fact) == ["capital", "people"]
    date = generate(inference, chat=QUESTION, sampling=greedy(regex=r"[0-9]{4}-[0-9]{2}", **more)).text
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}", date)


def test_a_request_chooses_its_own_speculation(inference: pb_grpc.InferenceStub) -> None:
    options = pb.SpeculationOptions(policy="static", max_length=2)
    dsde = checked(generate(inference, prompt=COUNT, sampling=greedy(), speculation=options))
    assert (dsde.policy, dsde.speculation_length.max, dsde.speculation_length.limit) == ("static", 2, 2)
    options = pb.SpeculationOptions(max_length=0)
    off = generate(inference, prompt=COUNT, sampling=greedy(), speculation=options)
    assert off.speculation.num_draft_tokens == 0
    # Nothing was measured, which is not zero.
    assert not off.speculation.dsde.HasField("stability")
    assert not off.speculation.dsde.kld.HasField("mean")


def test_the_model_says_what_it_takes(inference: pb_grpc.InferenceStub, served: Served) -> None:
    model = inference.GetModel(pb.GetModelRequest(), timeout=ANSWER_TIMEOUT_S)
    assert (model.name, model.max_model_len, model.vocab_size) == (served.model, 4096, 49152)
    assert model.max_speculation_length == 8
    assert {"paper", "static", "autoregressive"} <= set(model.policies)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("wanted", "field", "told"),
    [
        ({}, "input", "prompt, prompt_token_ids or chat"),
        ({"prompt": ""}, "prompt", "non-empty"),
        ({"prompt_token_ids": pb.TokenIds(ids=[10**6])}, "prompt_token_ids", "1000000"),
        ({"prompt_token_ids": pb.TokenIds(ids=[5] * 5000)}, "prompt_token_ids", "4096"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature", "got -1.0"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p", "(0, 1], got 2.0"),
        ({"sampling": {"min_p": 2}}, "sampling.min_p", "[0, 1], got 2.0"),
        ({"sampling": {"repetition_penalty": -1}}, "sampling.repetition_penalty", "got -1.0"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens", "at least 1, got 0"),
        ({"sampling": {"logprobs": 50}}, "sampling.logprobs", "max allowed: 20"),
        ({"sampling": {"stop_token_ids": [-1]}}, "sampling.stop_token_ids", "49152"),
        ({"sampling": {"json_schema": "{"}}, "sampling.json_schema", "'{'"),
        ({"sampling": {"regex": "(("}}, "sampling.regex", "'(('"),
        ({"speculation": {"policy": "best"}}, "speculation.policy", "'best': accepted: adaedl"),
        ({"speculation": {"max_length": 9}}, "speculation.max_length", "from 0 to 8"),
    ],
)
def test_a_bad_field_is_named(
    inference: pb_grpc.InferenceStub, wanted: dict[str, Any], field: str, told: str, stream: bool
) -> None:
    whole = wanted if not wanted or wanted.keys() & {"prompt", "prompt_token_ids"} else {"prompt": COUNT, **wanted}
    request = pb.GenerateRequest(**whole)
    call = inference.GenerateStream if stream else inference.Generate
    with pytest.raises(grpc.RpcError) as refused:
        list(call(request, timeout=ANSWER_TIMEOUT_S))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in refused.value.details()
    assert told in refused.value.details()
    status = Status.FromString(dict(refused.value.trailing_metadata())["grpc-status-details-bin"])
    violations = BadRequest()
    assert status.details[0].Unpack(violations)
    assert [one.field for one in violations.field_violations] == [field]


def test_an_unknown_model_is_not_found(inference: pb_grpc.InferenceStub, served: Served) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        generate(inference, prompt=COUNT, model="nobody")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert f"Valid aliases: {served.model}" in refused.value.details()


def test_too_large_a_message_is_resource_exhausted(inference: pb_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        generate(inference, prompt="x" * (4 * 2**20 + 1))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def whole(inference: pb_grpc.InferenceStub, timeout_s: float) -> grpc.Future:
    return inference.Generate.future(ENDLESS, timeout=timeout_s)


def streamed(inference: pb_grpc.InferenceStub, timeout_s: float) -> Any:
    return inference.GenerateStream(ENDLESS, timeout=timeout_s)


@pytest.mark.parametrize("call", [whole, streamed])
def test_a_cancel_stops_the_engine_within_a_second(
    inference: pb_grpc.InferenceStub, engines: DeploymentHandle, call: Callable[..., Any]
) -> None:
    running = call(inference, ANSWER_TIMEOUT_S)
    seconds_until(lambda: unfinished(engines) == 1, 60)
    running.cancel()
    assert seconds_until(lambda: unfinished(engines) == 0, 60) < 1.0


@pytest.mark.parametrize("call", [whole, streamed])
def test_a_deadline_stops_the_engine_within_a_second(
    inference: pb_grpc.InferenceStub, engines: DeploymentHandle, call: Callable[..., Any]
) -> None:
    running = call(inference, 4.0)
    seconds_until(lambda: unfinished(engines) == 1, 4)
    assert running.exception(60).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert seconds_until(lambda: unfinished(engines) == 0, 60) < 1.0


def test_a_full_queue_is_resource_exhausted(
    inference: pb_grpc.InferenceStub, web: httpx.Client, engines: DeploymentHandle
) -> None:
    # The replicas take 64 each, 256 wait for them.
    calls = [inference.Generate.future(ENDLESS, timeout=ANSWER_TIMEOUT_S) for _ in range(2 * 64 + 256)]

    def one_was_refused(known: int) -> bool:
        calls.append(inference.Generate.future(ENDLESS, timeout=ANSWER_TIMEOUT_S))
        return any(call.done() for call in calls[known:])

    refused_over_http: list[httpx.Response] = []

    def refused_as_well() -> bool:
        # Places may become free once more, while the replicas take their last ones.
        known = len(calls)
        seconds_until(lambda: one_was_refused(known), 60)
        with suppress(httpx.ReadTimeout):
            refused_over_http.append(web.post("/v1/completions", json={"prompt": COUNT}, timeout=5))
        return bool(refused_over_http)

    try:
        seconds_until(refused_as_well, 120)
        told = {(call.code(), call.details()) for call in calls if call.done()}
        over_http = refused_over_http[0]
        health = web.get("/health", timeout=5)
    finally:
        for call in calls:
            call.cancel()
    text = "every engine replica is full; send the request again later"
    assert told == {(grpc.StatusCode.RESOURCE_EXHAUSTED, text)}
    assert (over_http.status_code, over_http.json()["error"]["message"]) == (503, text)
    # Full is not dead.
    assert health.status_code == 200
    seconds_until(lambda: unfinished(engines) == 0, 60)


def test_health_is_the_standard_one(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    for name in ("", "dsde.v1.Inference"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30) == serving
    watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
    assert next(watched) == serving
    watched.cancel()
    with pytest.raises(grpc.RpcError) as refused:
        health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=30)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_the_service(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {"dsde.v1.Inference", "grpc.health.v1.Health"} <= set(database.get_services())
    service = DescriptorPool(database).FindServiceByName("dsde.v1.Inference")
    assert sorted(service.methods_by_name) == ["Generate", "GenerateStream", "GetModel"]


def test_grpc_listens_on_loopback_only(served: Served) -> None:
    port = int(served.address.rpartition(":")[2])

    def listening() -> set[str]:
        found = set()
        for process in psutil.Process(served.pid).children(recursive=True):
            # A process may end while it is asked.
            with suppress(psutil.Error):
                own = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
                found |= {one.laddr.ip.removeprefix("::ffff:") for one in own if one.laddr.port == port}
        return found

    seconds_until(lambda: bool(listening()), 10)
    assert listening() == {"127.0.0.1"}


def dsde_client(served: Served, way: str, *arguments: str) -> subprocess.Popen[str]:
    where = ["--grpc", "--address", served.address] if way == "grpc" else ["--url", served.url]
    command = [sys.executable, "-m", "dsde.cli", "client", "What is the capital of France?", *where, *arguments]
    # Who starts the tests in the background may have them ignore interrupts, which their children would inherit.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"DSDE_API_KEY": served.key},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_the_client_shows_answer_and_figures(served: Served, inference: pb_grpc.InferenceStub, way: str) -> None:
    expected = generate(inference, chat=QUESTION, sampling=greedy(max_tokens=4)).text
    wanted = ("--max-tokens", "4", "--temperature", "0", "--policy", "static")
    text, figures = dsde_client(served, way, *wanted).communicate(timeout=ANSWER_TIMEOUT_S)
    assert text == f"{expected}\n"
    assert "4 out (length)" in figures
    assert "static, " in figures
    answer = json.loads(dsde_client(served, way, *wanted, "--json", "--no-stream").communicate(timeout=60)[0])
    assert answer["text"] + "\n" == text
    assert answer["speculation"]["dsde"]["policy"] == "static"


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_interrupting_the_client_stops_the_engine(served: Served, engines: DeploymentHandle, way: str) -> None:
    process = dsde_client(served, way, "--max-tokens", "2000", "--temperature", "1.5")
    seconds_until(lambda: unfinished(engines) == 1, 60)
    process.send_signal(signal.SIGINT)
    assert seconds_until(lambda: unfinished(engines) == 0, 60) < 2.0
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told.strip()) == (130, "dsde client: cancelled")


def test_the_client_tells_a_refusal(served: Served) -> None:
    process = dsde_client(served, "grpc", "--policy", "best")
    text, told = process.communicate(timeout=60)
    assert (process.returncode, text) == (1, "")
    assert "INVALID_ARGUMENT: speculation.policy = 'best': accepted: adaedl" in told
