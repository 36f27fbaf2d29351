"""The remote client without an engine or a model: what crosses, what comes back, what is refused."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from dsde.access.gate import Admission
from dsde.engine import remote
from dsde.engine.call import EngineDied
from dsde.engine.figures import attach_figures
from dsde.engine.hint import HINT_HEADER, HintHeader
from dsde.engine.options import RequestOptions, parse
from dsde.engine.remote import EngineUnavailable, GenerateCall, RemoteEngineClient

PROMPT = {"type": "token", "prompt_token_ids": [5, 6, 7], "prompt": "one two three"}
FIGURES = {"policy": "paper", "steps": 2}
EVENTS = [("dsde.speculation.on", 5, {"dsde.step": 0})]
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def output(token_ids: list[int], finished: bool = False, **fields: Any) -> RequestOutput:
    completion = CompletionOutput(0, "", token_ids, None, None, finish_reason="stop" if finished else None)
    return RequestOutput("r", None, None, None, [completion], finished, **fields)


class Engine:
    """Stands where a replica does: two outputs, figures on the last; remembers what reached it and how it ended."""

    def __init__(self) -> None:
        self.calls: list[GenerateCall] = []
        self.closed = asyncio.Event()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        self.calls.append(call)
        try:
            yield output([1])
            if call.request_id == "endless":
                await asyncio.Event().wait()
            yield output([1, 2], finished=True, kv_transfer_params={"dsde": FIGURES, "dsde_events": EVENTS})
        finally:
            self.closed.set()

    async def check(self) -> None:
        """Healthy."""


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    renderer = SimpleNamespace(tokenizer=None, validate_token_ids=lambda ids: None)
    monkeypatch.setattr(remote, "renderer_from_config", lambda config: renderer)
    monkeypatch.setattr(remote, "InputProcessor", lambda config, renderer: SimpleNamespace())

    def client(generate: Any, check: Any, **options: Any) -> RemoteEngineClient:
        model = {"served_model_name": "embedded", "max_logprobs": 20, "is_diffusion": False}
        config: Any = SimpleNamespace(model_config=SimpleNamespace(**model, get_vocab_size=lambda: 12))
        return RemoteEngineClient(config, generate, check, max_length=4, **options)

    return client


async def test_token_ids_cross_and_the_prompt_is_put_back(build: Any, engine: Engine) -> None:
    client = build(engine.generate, engine.check)
    outputs = [
        one async for one in client.generate(PROMPT, SamplingParams(max_tokens=2), "r", priority=3, trace_headers=TRACE)
    ]
    (call,) = engine.calls
    # Nobody records spans here, so the engine joins the client's own.
    assert call.trace_headers == TRACE
    assert call.prompt == {"type": "token", "prompt_token_ids": [5, 6, 7]}
    assert (call.request_id, call.priority) == ("r", 3)
    assert [(one.prompt, one.prompt_token_ids) for one in outputs] == [("one two three", [5, 6, 7])] * 2


async def test_figures_move_into_the_metrics_of_the_last_output(build: Any, engine: Engine) -> None:
    client = build(engine.generate, engine.check)
    first, last = [one async for one in client.generate(PROMPT, SamplingParams(), "r")]
    assert first.outputs[0].spec_decode_metrics is None
    assert last.kv_transfer_params is None
    # No verification step was counted, so vLLM's part is an empty histogram of lengths 0 to 4.
    metrics = last.outputs[0].spec_decode_metrics.to_dict()
    assert metrics["acceptance_histogram"] == [0, 0, 0, 0, 0]
    assert metrics["dsde"] == FIGURES


def test_figures_leave_vllms_numbers_and_a_connectors_parameters_alone() -> None:
    one = output([1], finished=True, kv_transfer_params={"dsde": FIGURES, "remote_port": 7})
    measured = RequestSpecDecodeMetrics.new(4)
    measured.observe(num_draft_tokens=4, num_accepted=3)
    one.outputs[0].spec_decode_metrics = measured
    attach_figures(one, 4)
    assert one.kv_transfer_params == {"remote_port": 7}
    told = one.outputs[0].spec_decode_metrics.to_dict()
    assert {key: value for key, value in told.items() if key != "dsde"} == measured.to_dict()
    assert (told["mean_acceptance_length"], told["draft_acceptance_rate"]) == (4.0, 0.75)


async def test_a_bad_option_is_refused_before_anything_streams(build: Any, engine: Engine) -> None:
    client = build(engine.generate, engine.check)
    with pytest.raises(VLLMValidationError, match=r"vllm_xargs.dsde_max_length = 5: accepted: an integer from 0 to 4"):
        client.generate(PROMPT, SamplingParams(extra_args={"dsde_max_length": 5}), "r")
    assert engine.calls == []


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [12]}, "stop_token_ids"),
        ({"allowed_token_ids": [12]}, "allowed_token_ids"),
        ({"logit_bias": {12: 1.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
async def test_what_the_model_lacks_is_refused_before_anything_streams(
    build: Any, engine: Engine, params: dict[str, Any], field: str
) -> None:
    client = build(engine.generate, engine.check)
    with pytest.raises(VLLMValidationError) as refused:
        client.generate(PROMPT, SamplingParams(**params), "r")
    assert refused.value.parameter == field
    assert engine.calls == []


async def test_what_drafts_do_not_go_with_is_taken(build: Any, engine: Engine) -> None:
    client = build(engine.generate, engine.check)
    async for _ in client.generate(PROMPT, SamplingParams(min_p=0.1, logit_bias={3: 1.0}), "r"):
        pass
    assert len(engine.calls) == 1


class Counted(Admission):
    def __init__(self) -> None:
        super().__init__(None)
        self.tokens = 0

    def charge(self, tokens: int) -> None:
        self.tokens += tokens


@pytest.mark.parametrize(
    ("kind", "dropped", "tokens"),
    [
        # Three of the prompt, then one and two as the stand-in sends them.
        (RequestOutputKind.DELTA, False, 3 + 1 + 2),
        (RequestOutputKind.DELTA, True, 3 + 1),
        # The longest that both answers could have got.
        (RequestOutputKind.FINAL_ONLY, True, 3 + 1 + 2 * 50),
    ],
)
async def test_tokens_are_charged_to_the_request_s_key(
    build: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: RequestOutputKind, dropped: bool, tokens: int
) -> None:
    counted = Counted()
    monkeypatch.setattr(remote, "admission", lambda: counted)
    params = SamplingParams(max_tokens=50, n=2, output_kind=kind)
    stream = build(engine.generate, engine.check).generate(PROMPT, params, "endless" if dropped else "r")
    if dropped:
        await anext(stream)
        await stream.aclose()
    else:
        async for _ in stream:
            pass
    assert counted.tokens == tokens


async def ask_with(header: str | None, client: RemoteEngineClient, body: dict[str, Any] | None) -> None:
    """One request through the middleware, its header and its `vllm_xargs` as given."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async for _ in client.generate(PROMPT, SamplingParams(extra_args=body), "r"):
            pass

    headers = [] if header is None else [(HINT_HEADER.encode(), header.encode())]
    await HintHeader(app)({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "body", "sent"),
    [
        ("code", None, {"dsde_hint": "code"}),
        ("code", {"dsde_max_length": 2}, {"dsde_max_length": 2, "dsde_hint": "code"}),
        ("code", {"dsde_hint": "chat"}, {"dsde_hint": "chat"}),
        (None, None, None),
    ],
)
async def test_a_hint_in_a_header_goes_where_one_in_the_body_does(
    build: Any, engine: Engine, header: str | None, body: dict[str, Any] | None, sent: dict[str, Any] | None
) -> None:
    client = build(engine.generate, engine.check)
    await ask_with("of another request", client, None)
    await ask_with(header, client, body)
    assert engine.calls[-1].sampling_params.extra_args == sent


async def test_a_bad_hint_in_a_header_is_refused_by_the_header_s_name(build: Any, engine: Engine) -> None:
    with pytest.raises(VLLMValidationError, match=r"x-dsde-hint = '': accepted: a name of 1 to 32 characters"):
        await ask_with("", build(engine.generate, engine.check), None)
    assert engine.calls == []


async def test_closing_the_stream_closes_the_engines(build: Any, engine: Engine) -> None:
    stream = build(engine.generate, engine.check).generate(PROMPT, SamplingParams(), "endless")
    await anext(stream)
    await stream.aclose()
    assert engine.closed.is_set()


async def test_cancelling_the_reader_closes_the_engines(build: Any, engine: Engine) -> None:
    stream = build(engine.generate, engine.check).generate(PROMPT, SamplingParams(), "endless")
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert engine.closed.is_set()


async def test_a_lost_engine_is_a_retryable_error_and_bad_health(build: Any) -> None:
    async def lost(call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        raise EngineUnavailable("gone")
        yield

    async def nobody() -> None:
        raise EngineUnavailable("nobody")

    client = build(lost, nobody, max_retries=0)
    with pytest.raises(RetryableRequestError, match="gone") as caught:
        await anext(client.generate(PROMPT, SamplingParams(), "r"))
    assert caught.value.status_code == 503
    with pytest.raises(EngineDeadError):
        await client.check_health()


async def test_a_request_that_kills_engines_is_an_error_that_nobody_should_retry(build: Any, engine: Engine) -> None:
    calls = []

    async def dies(call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        calls.append(call)
        raise EngineDied("died")
        yield

    client = build(dies, engine.check)
    with pytest.raises(GenerationError, match="2 engines died while they had this request") as caught:
        await anext(client.generate(PROMPT, SamplingParams(), "r"))
    assert (caught.value.status_code, len(calls)) == (500, 2)
    assert not isinstance(caught.value, RetryableRequestError)


def test_a_call_survives_pickling() -> None:
    call = GenerateCall({"type": "token", "prompt_token_ids": [1]}, SamplingParams(max_tokens=3, seed=1), "r")
    copy = pickle.loads(pickle.dumps(call))
    assert (copy.prompt, copy.request_id) == (call.prompt, call.request_id)
    assert (copy.sampling_params.max_tokens, copy.sampling_params.seed) == (3, 1)
    died = pickle.loads(pickle.dumps(EngineDied("died", "a")))
    assert (str(died), died.replica) == ("died", "a")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, RequestOptions()),
        ({"somebody_elses": 1}, RequestOptions()),
        ({"dsde_policy": "static", "dsde_max_length": 0}, RequestOptions("static", 0)),
        ({"dsde_max_length": 4}, RequestOptions(None, 4)),
        ({"dsde_hint": "code"}, RequestOptions()),
    ],
)
def test_options_are_read(given: dict[str, Any] | None, read: RequestOptions) -> None:
    assert parse(given, 4) == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dsde_policy": "best"}, "vllm_xargs.dsde_policy = 'best': accepted: adaedl, autoregressive, "),
        ({"dsde_policy": 3}, "vllm_xargs.dsde_policy = 3: accepted: "),
        ({"dsde_max_length": -1}, "vllm_xargs.dsde_max_length = -1: accepted: an integer from 0 to 4 draft tokens"),
        ({"dsde_max_length": True}, "vllm_xargs.dsde_max_length = True: accepted: "),
        ({"dsde_max_length": 2.0}, "vllm_xargs.dsde_max_length = 2.0: accepted: "),
        ({"dsde_hint": ""}, "vllm_xargs.dsde_hint = '': accepted: a name of 1 to 32 characters"),
        ({"dsde_hint": 4}, "vllm_xargs.dsde_hint = 4: accepted: a name"),
        ({"dsde_length": 2}, "vllm_xargs.dsde_length = 2: there is no such option; accepted: dsde_policy, dsde_max_l"),
    ],
)
def test_a_refusal_names_the_field_the_value_and_what_is_accepted(given: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        parse(given, 4)
    assert str(caught.value).startswith(message)
    assert caught.value.parameter == f"vllm_xargs.{next(iter(given))}"
