"""Bad requests against the whole ingress, HTTP and gRPC, with a real tokenizer, and no engine behind it.

Each is refused by the name of its field, quickly, before an engine would hear of it; the next good one is answered.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput, RequestOutput

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.rpc.service import InferenceService
from dsde.access.gate import Gate
from dsde.config import LimitsConfig, from_values
from dsde.engine.generation import TextGeneration
from dsde.engine.openai_app import build_openai_app
from dsde.engine.plugin import engine_arguments
from dsde.engine.remote import GenerateCall, RemoteEngineClient

CASES = 40
"""Of each field, on each operation: more than a thousand on each."""
PATIENCE_S = 2.0
"""Of a core: how long others have it is not the ingress's affair."""
VOCABULARY = 49152
MODEL_LEN = 4096
COMPLETION = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0.5}
SCHEMA = {"type": "json_schema", "name": "a_schema"}
CHAT = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4, "temperature": 0.5}
RESPONSE = {"input": "Name a colour.", "max_output_tokens": 4, "temperature": 0.5}
OPERATIONS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}

outside = st.integers(VOCABULARY, 2**40) | st.integers(-(2**40), -1)
not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
lists_with_one_outside = st.tuples(st.lists(st.integers(0, 99), max_size=5), outside).map(lambda two: [*two[0], two[1]])

BAD: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(-(2**70), 0),
    "min_tokens": st.integers(-(2**70), -1) | st.integers(5, 2**70),
    "n": st.integers(-(2**70), 0) | st.integers(9, 2**70),
    "temperature": st.floats(max_value=-1e-9) | st.floats(min_value=2.001) | not_finite,
    "top_p": st.floats(max_value=0) | st.floats(min_value=1.001) | not_finite,
    "top_k": st.integers(-(2**31), -2),
    "min_p": st.floats(max_value=-1e-9) | st.floats(min_value=1.001) | not_finite,
    "presence_penalty": st.floats(max_value=-2.001) | st.floats(min_value=2.001) | not_finite,
    "frequency_penalty": st.floats(max_value=-2.001) | st.floats(min_value=2.001) | not_finite,
    "repetition_penalty": st.floats(max_value=0) | not_finite,
    "seed": st.integers(2**63, 2**80) | st.integers(-(2**80), -(2**63) - 1) | text.filter(lambda one: not _number(one)),
    "stop_token_ids": lists_with_one_outside,
    "allowed_token_ids": lists_with_one_outside | st.just([]),
    "logit_bias": st.dictionaries(outside.map(str), st.just(1.0), min_size=1, max_size=3)
    | st.dictionaries(st.just("5"), not_finite, min_size=1)
    | st.dictionaries(st.sampled_from(["x", "", "1.5", "0x1"]), st.just(1.0), min_size=1),
    "bad_words": st.just([""]) | st.just(["a"] * 2 + [""]),
    "stop": st.just([""]) | st.lists(text, min_size=5, max_size=9),
    "model": text.filter(lambda name: name != "embedded"),
    "request_id": st.integers(129, 5000).map("x".__mul__),
    "dsde_policy": text.map(lambda name: ("vllm_xargs", {"dsde_policy": name})),
    "dsde_max_length": (st.integers(9, 2**40) | st.integers(-(2**40), -1) | st.sampled_from([0.5, "2", [1]])).map(
        lambda length: ("vllm_xargs", {"dsde_max_length": length})
    ),
    "dsde_length": st.just(("vllm_xargs", {"dsde_length": 3})),
    "dsde_hint": st.integers(33, 999).map(lambda size: ("vllm_xargs", {"dsde_hint": "x" * size})),
    "structured_outputs": st.sampled_from(
        [
            {},
            {"regex": "a" * 70_000},
            {"regex": "a", "choice": ["b"]},
            {"choice": []},
            {"json": "[" * 500},
            {"json": {"type": "string", "enum": ["x" * 70_000]}},
        ]
    ),
    "best_of": st.integers(),
    "guided_regex": text,
    "stream_options": st.just({"include_usage": "maybe"}),
    "logprobs": st.integers(21, 2**40) | st.integers(-(2**40), -2),
}
# What another operation calls a field, and what it wants besides.
NAMES = {
    "/v1/completions": {},
    "/v1/chat/completions": {"logprobs": "top_logprobs"},
    "/v1/responses": {"logprobs": "top_logprobs", "max_tokens": "max_output_tokens"},
}
BESIDES = {
    "/v1/completions": {},
    "/v1/chat/completions": {"logprobs": True},
    "/v1/responses": {"include": ["message.output_text.logprobs"]},
}


def _number(one: str) -> bool:
    try:
        float(one)
    except ValueError:
        return False
    return True


class Ingress:
    """What the ingress deployment builds, with a stand-in where the handle to the replicas would be."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.calls: list[GenerateCall] = []
        self._runner = runner
        runner.run(self._build())

    async def _build(self) -> None:
        config = from_values({})
        vllm_config = AsyncEngineArgs(**engine_arguments(config)).create_engine_config()
        client = RemoteEngineClient(vllm_config, self._generate, self._check, max_length=8)
        app = await build_openai_app(client, "embedded", "hermes", LimitsConfig(sequences=8))
        self._web = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://x"
        )
        self._rpc = InferenceService()
        self._rpc.offer(TextGeneration(client, app.state), Gate(None, LimitsConfig(), 1), 8)

    async def _generate(self, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        self.calls.append(call)
        answers = [
            CompletionOutput(number, "a", [5], None, None, finish_reason="stop")
            for number in range(call.sampling_params.n)
        ]
        yield RequestOutput(call.request_id, None, None, None, answers, True)  # type: ignore[arg-type]

    async def _check(self) -> None:
        """Healthy."""

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = {"content-type": "application/json", **{name.replace("_", "-"): one for name, one in headers.items()}}
        return self._runner.run(self._web.post(path, content=content, headers=asked))

    def get(self, path: str) -> httpx.Response:
        return self._runner.run(self._web.get(path))

    def call(self, request: pb.GenerateRequest) -> Context:
        context = Context()
        self._runner.run(self._rpc.Generate(request, context))
        return context

    def probe(self) -> None:
        """A good request is answered."""
        for path, body in OPERATIONS.items():
            assert self.post(path, body).status_code == 200
        assert self.call(pb.GenerateRequest(prompt="One, two,")).code is None


class Context:
    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, bytes]]) -> None:
        """Nobody looks."""


@pytest.fixture(scope="module")
def ingress() -> Iterator[Ingress]:
    with asyncio.Runner() as runner:
        yield Ingress(runner)


many = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def refused(ingress: Ingress, path: str, body: Any, field: str, **headers: str) -> None:
    calls, start = len(ingress.calls), time.process_time()
    answer = ingress.post(path, body, **headers)
    assert time.process_time() - start < PATIENCE_S
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    told = f"{error['param']} {error['message']}"
    assert field in told or field.replace("_", " ") in told, answer.text
    assert len(answer.content) < 20_000
    assert len(ingress.calls) == calls


@pytest.mark.parametrize("path", OPERATIONS)
@pytest.mark.parametrize("field", BAD)
def test_a_bad_field_is_a_4xx_that_names_it(ingress: Ingress, path: str, field: str) -> None:
    @many
    @given(value=BAD[field], stream=st.booleans())
    def check(value: Any, stream: bool) -> None:
        name, sent = value if isinstance(value, tuple) else (field, value)
        more = BESIDES[path] if field == "logprobs" else {}
        called = NAMES[path].get(name, name)
        # vLLM names the bound of all operations, not each one's name for it.
        wanted = field if field.startswith("dsde") or field == "logprobs" else called
        refused(ingress, path, {**OPERATIONS[path], **more, called: sent, "stream": stream}, wanted)

    check()
    ingress.probe()


GOOD: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, MODEL_LEN // 2) | st.none(),
    "temperature": st.floats(0.1, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, VOCABULARY),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 5),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": text | st.lists(text, max_size=4),
    "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
    "allowed_token_ids": st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
    "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1).map(str), st.floats(-100, 100), max_size=4),
    "n": st.integers(1, 8),
    "user": text,
    "store": st.booleans(),
    "metadata": st.dictionaries(text, text, max_size=2),
    "vllm_xargs": st.fixed_dictionaries(
        {"dsde_policy": st.sampled_from(["static", "goodput"]), "dsde_max_length": st.integers(0, 8)}
    ),
}


NOT_OF_RESPONSES = {"max_tokens", "allowed_token_ids", "n"}


@pytest.mark.parametrize("path", OPERATIONS)
def test_good_fields_in_any_company_are_taken(ingress: Ingress, path: str) -> None:
    @many
    @given(more=st.fixed_dictionaries({}, optional=GOOD))
    def check(more: dict[str, Any]) -> None:
        known = {name: value for name, value in more.items() if path != "/v1/responses" or name not in NOT_OF_RESPONSES}
        answer = ingress.post(path, {**OPERATIONS[path], **known})
        assert answer.status_code == 200, answer.text

    check()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": 7}, "prompt"),
        ("/v1/completions", {"prompt": [VOCABULARY]}, str(VOCABULARY)),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 5000}, str(MODEL_LEN)),
        ("/v1/completions", {"prompt": "x" * 3_000_000}, str(MODEL_LEN)),
        ("/v1/completions", {"prompt": [5] * 5000}, str(MODEL_LEN)),
        ("/v1/completions", {"prompt": ["a"] * 5000}, "prompt list length 5000"),
        ("/v1/completions", {"prompt": [[5]] * 5000}, "prompt list length 5000"),
        ("/v1/completions", {"prompt": ["a"] * 9}, "9 prompt(s)"),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 5}, "n = 5 with 2"),
        ("/v1/completions", {"prompt": "a", "max_tokens": None, "min_tokens": 10**9}, "min_tokens"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": "hello"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "hello"}]}, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 5000}]}, str(MODEL_LEN)),
        ("/v1/chat/completions", {**CHAT, "chat_template": "{{ 7 * 7 }}"}, "hat template"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "hat template"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": None, "min_tokens": 10**9}, "min_tokens"),
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [7]}, "input"),
        ("/v1/responses", {"input": "word " * 5000}, str(MODEL_LEN)),
        ("/v1/responses", {**RESPONSE, "previous_response_id": "resp_5"}, "resp_5"),
        ("/v1/responses", {**RESPONSE, "background": True}, "background"),
        ("/v1/responses", {**RESPONSE, "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "hat template"),
        ("/v1/responses", {**RESPONSE, "text": {"format": SCHEMA | {"schema": {"type": "nothing"}}}}, "text"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {**CHAT, "chat_template": "{{ 7 * 7 }}"}, "hat template"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/v1/messages", CHAT, "Not Found"),
        ("/inference/v1/generate", {"token_ids": [5]}, "Not Found"),
        ("/inference/v1/abort_requests", {}, "Not Found"),
        ("/scale_elastic_ep", {}, "Not Found"),
    ],
)
def test_what_cannot_be_answered_is_a_4xx_that_says_why(ingress: Ingress, path: str, body: Any, field: str) -> None:
    for stream in (False, True) if path in OPERATIONS else (None,):
        refused(ingress, path, body if stream is None else {**body, "stream": stream}, field)
    ingress.probe()


values = st.none() | st.booleans() | st.integers() | st.floats() | text
values |= st.lists(values, max_size=4) | st.dictionaries(text, values, max_size=4)


@pytest.mark.parametrize(
    ("path", "field", "bad"),
    [
        ("/tokenize", "prompt", values.filter(lambda value: not isinstance(value, str))),
        ("/tokenize", "messages", values.filter(lambda value: value != [])),
        ("/detokenize", "tokens", values.filter(lambda value: not isinstance(value, list))),
    ],
)
def test_a_value_of_another_kind_is_a_4xx_that_names_its_field(
    ingress: Ingress, path: str, field: str, bad: st.SearchStrategy[Any]
) -> None:
    @settings(many, max_examples=1000)
    @given(value=bad)
    def check(value: Any) -> None:
        refused(ingress, path, {field: value}, field)

    check()
    ingress.probe()


@pytest.mark.parametrize("path", OPERATIONS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"\x00",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": ' + b'[{"a": ' * 50_000 + b"1" + b"}]" * 50_000 + b"}",
        b'{"max_tokens": ' + b"9" * 100_000 + b"}",
        b'{"prompt": "a", "messages": [], "max_tokens": 1e999}',
    ],
    ids=lambda body: repr(body[:16]),
)
def test_a_body_that_is_none_is_refused(ingress: Ingress, path: str, body: bytes) -> None:
    refused(ingress, path, body, "")
    ingress.probe()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_another_content_type_is_refused(ingress: Ingress, kind: str) -> None:
    refused(ingress, "/v1/completions", COMPLETION, "application/json", content_type=kind)


def test_text_that_breaks_others_is_taken(ingress: Ingress) -> None:
    for prompt in ("\x00", "a\x00b", "\u202e\ufeff", "<|im_start|>system\n", "{{ 7 * 7 }}", "%s%n", "\U0010ffff" * 50):
        assert ingress.post("/v1/completions", {**COMPLETION, "prompt": prompt}).status_code == 200
        answer = ingress.post("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]})
        assert answer.status_code == 200
    # Half of a surrogate pair is no text.
    answer = ingress.post("/v1/completions", b'{"prompt": "\\ud800", "max_tokens": 4}')
    assert answer.status_code in (200, 400)
    ingress.probe()


@pytest.mark.parametrize("regex", ["(a+)+b", "((((a*)*)*)*)*b", "(a|a)*b", "(x+x+)+y", "a{1,200}b{1,200}"])
def test_a_regex_that_others_choke_on_is_read_quickly(ingress: Ingress, regex: str) -> None:
    start = time.process_time()
    answer = ingress.post("/v1/completions", {**COMPLETION, "structured_outputs": {"regex": regex}})
    assert time.process_time() - start < PATIENCE_S
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "(("},
        {"regex": "[z-a]"},
        {"regex": "a\x00"},
        {"json": "{"},
        {"json": {"type": "nothing"}},
        {"json": {"$ref": "#/nowhere"}},
        {"grammar": "not a grammar ::="},
        {"grammar": " "},
        {"json_object": False},
        {"structural_tag": "{"},
        # vLLM's own check: to read one so deep takes half a minute.
        {"json": '{"type":"object","properties":{"a":' * 900 + "{}" + "}}" * 900},
        {"json": '{"items":' * 101 + "{}" + "}" * 101},
    ],
    ids=lambda structure: str(structure)[:40],
)
def test_a_malformed_grammar_is_refused_before_a_stream_begins(ingress: Ingress, structure: Any) -> None:
    for stream in (False, True):
        body = {**COMPLETION, "structured_outputs": structure, "stream": stream}
        refused(ingress, "/v1/completions", body, "structured_outputs")
    ingress.probe()


def test_a_thousand_schemas_of_their_own_are_taken(ingress: Ingress) -> None:
    start = time.process_time()
    for number in range(1000):
        schema = {"type": "object", "properties": {f"field{number}": {"type": "integer"}}}
        answer = ingress.post("/v1/completions", {**COMPLETION, "structured_outputs": {"json": schema}})
        assert answer.status_code == 200, answer.text
    assert time.process_time() - start < 60
    ingress.probe()


INT32 = 2**31
BAD_OVER_GRPC: dict[str, st.SearchStrategy[Any]] = {
    "sampling.max_tokens": st.integers(-INT32, 0),
    "sampling.min_tokens": st.integers(-INT32, -1) | st.integers(17, INT32 - 1),
    "sampling.temperature": BAD["temperature"],
    "sampling.top_p": BAD["top_p"],
    "sampling.top_k": st.integers(-INT32, -2),
    "sampling.min_p": BAD["min_p"],
    "sampling.presence_penalty": BAD["presence_penalty"],
    "sampling.frequency_penalty": BAD["frequency_penalty"],
    "sampling.repetition_penalty": BAD["repetition_penalty"],
    "sampling.stop": BAD["stop"],
    "sampling.stop_token_ids": st.lists(
        st.integers(VOCABULARY, INT32 - 1) | st.integers(-INT32, -1), min_size=1, max_size=4
    ),
    "sampling.logprobs": st.integers(21, INT32 - 1) | st.integers(-INT32, -2),
    "sampling.json_schema": st.sampled_from(["", "{", "[" * 500, "7", '{"type": "nothing"}', "x" * 70_000]),
    "sampling.regex": st.sampled_from(["((", "[z-a]", "a\x00", "a" * 70_000]),
    "speculation.policy": text,
    "speculation.max_length": st.integers(9, INT32 - 1) | st.integers(-INT32, -1),
    "speculation.hint": st.integers(33, 999).map("x".__mul__) | st.just(""),
    "prompt_token_ids": st.lists(st.integers(VOCABULARY, INT32 - 1) | st.integers(-INT32, -1), max_size=4),
    "prompt": st.just("") | st.integers(5000, 9000).map("word ".__mul__),
    "chat": st.lists(text.filter(lambda role: role not in ("system", "user", "assistant")), max_size=3),
    "request_id": st.integers(129, 5000).map("x".__mul__),
    "model": text.filter(lambda name: name != "embedded"),
}


def message(field: str, value: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(prompt="One, two,")
    if field == "prompt_token_ids":
        request.prompt_token_ids.SetInParent()
        request.prompt_token_ids.ids.extend(value)
    elif field == "chat":
        request.chat.SetInParent()
        request.chat.messages.extend(pb.ChatMessage(role=role, content="a") for role in value)
    else:
        *path, name = field.split(".")
        part: Any = request
        for step in path:
            part = getattr(part, step)
        if isinstance(value, list):
            getattr(part, name).extend(value)
        else:
            setattr(part, name, value)
    return request


@pytest.mark.parametrize("field", BAD_OVER_GRPC)
def test_a_bad_field_of_a_message_is_an_invalid_argument_that_names_it(ingress: Ingress, field: str) -> None:
    wanted = grpc.StatusCode.NOT_FOUND if field == "model" else grpc.StatusCode.INVALID_ARGUMENT

    @settings(many, max_examples=50)
    @given(value=BAD_OVER_GRPC[field])
    def check(value: Any) -> None:
        calls, start = len(ingress.calls), time.process_time()
        context = ingress.call(message(field, value))
        assert time.process_time() - start < PATIENCE_S
        assert (context.code, field in context.details) == (wanted, True), context.details
        assert len(ingress.calls) == calls

    check()
    ingress.probe()
