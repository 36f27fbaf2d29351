"""The span of a request: GenAI semantic conventions, dsde's figures, and W3C trace context in and out.

Prompt and answer are recorded only by a span that was told to. Everything here is cheap when nobody traces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dsde.telemetry import names

__all__ = ["RequestSpan", "context_from", "headers_of", "is_sampled", "operation_of"]

_W3C = TraceContextTextMapPropagator()
_OPERATIONS = {
    "chatcmpl": gen_ai.GenAiOperationNameValues.CHAT.value,
    "resp": gen_ai.GenAiOperationNameValues.CHAT.value,
    "cmpl": gen_ai.GenAiOperationNameValues.TEXT_COMPLETION.value,
}
_SAMPLING = {
    "max_tokens": gen_ai.GEN_AI_REQUEST_MAX_TOKENS,
    "temperature": gen_ai.GEN_AI_REQUEST_TEMPERATURE,
    "top_p": gen_ai.GEN_AI_REQUEST_TOP_P,
    "top_k": gen_ai.GEN_AI_REQUEST_TOP_K,
    "seed": gen_ai.GEN_AI_REQUEST_SEED,
    "frequency_penalty": gen_ai.GEN_AI_REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": gen_ai.GEN_AI_REQUEST_PRESENCE_PENALTY,
    "n": gen_ai.GEN_AI_REQUEST_CHOICE_COUNT,
}
# Longer texts are cut: a span is held in memory until it is exported.
_LONGEST_CONTENT = 64_000


def context_from(carrier: Mapping[str, str] | None) -> Context:
    """The trace context that a client sent: HTTP headers or gRPC metadata with `traceparent`, names in lower case.

    The current context where the carrier has none, so that a span started in the result always joins what there is.
    """
    return _W3C.extract(carrier or {})


def headers_of(span: trace.Span | None = None) -> dict[str, str]:
    """`traceparent` and `tracestate` of `span`, or of the current span; empty where there is none."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, None if span is None else trace.set_span_in_context(span))
    return carrier


def is_sampled(carrier: Mapping[str, str] | None) -> bool:
    """Whether the trace that a carrier names is being recorded."""
    return bool(carrier) and trace.get_current_span(context_from(carrier)).get_span_context().trace_flags.sampled


def operation_of(request_id: str) -> str:
    """gen_ai.operation.name of a request, from the prefix that OpenAI ids have: chatcmpl-, cmpl-, resp_."""
    prefix = request_id.replace("_", "-").partition("-")[0]
    return _OPERATIONS.get(prefix, gen_ai.GenAiOperationNameValues.TEXT_COMPLETION.value)


class RequestSpan:
    """One request as its ingress sees it, from the rendered prompt to the last token.

    model: its name in the API. sampling: the request's sampling parameters, by OpenAI's names; other attributes are
    left out. carrier: the client's trace headers, used where no span is current. content: whether prompt and answer
    are recorded.
    """

    def __init__(
        self, model: str, request_id: str, sampling: Any, carrier: Mapping[str, str] | None, *, content: bool = False
    ) -> None:
        operation = operation_of(request_id)
        current = trace.get_current_span().get_span_context().is_valid
        self._span = trace.get_tracer("dsde").start_span(
            f"{operation} {model}", None if current else context_from(carrier), SpanKind.INTERNAL
        )
        self._recording = self._span.is_recording()
        self._content = content and self._recording
        self._text: dict[int, str] = {}
        self._tokens: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        if self._recording:
            self._span.set_attributes(
                {
                    gen_ai.GEN_AI_OPERATION_NAME: operation,
                    gen_ai.GEN_AI_PROVIDER_NAME: names.PROVIDER,
                    gen_ai.GEN_AI_REQUEST_MODEL: model,
                    gen_ai.GEN_AI_RESPONSE_MODEL: model,
                    gen_ai.GEN_AI_RESPONSE_ID: request_id,
                }
            )
            given = {key: getattr(sampling, name, None) for name, key in _SAMPLING.items()}
            self._span.set_attributes({key: value for key, value in given.items() if value is not None})

    def current(self) -> AbstractContextManager[object]:
        """The span as the current one, so that what starts in the block is its child."""
        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)

    @property
    def finished(self) -> bool:
        """Whether an answer has ended; always False for a span that nobody records."""
        return bool(self._reasons)

    @property
    def headers(self) -> dict[str, str]:
        """What joins the engine's spans to this one."""
        return headers_of(self._span)

    def prompt(self, num_tokens: int, text: str | None) -> None:
        """The prompt: its length in tokens, and its text, which is recorded only where content is."""
        if self._recording:
            self._span.set_attribute(gen_ai.GEN_AI_USAGE_INPUT_TOKENS, num_tokens)
        if self._content and text is not None:
            self._span.set_attribute(gen_ai.GEN_AI_INPUT_MESSAGES, _messages("user", [text]))

    def tokens(self, index: int, count: int, text: str, finish_reason: str | None, *, cumulative: bool) -> None:
        """New tokens of answer `index`. cumulative: whether `count` and `text` are those of the whole answer."""
        if not self._recording:
            return
        self._tokens[index] = count if cumulative else self._tokens.get(index, 0) + count
        if finish_reason is not None:
            self._reasons[index] = finish_reason
        if self._content:
            self._text[index] = text if cumulative else (self._text.get(index, "") + text)[:_LONGEST_CONTENT]

    def figures(self, figures: Mapping[str, Any], events: Sequence[Sequence[Any]]) -> None:
        """The request's `dsde` object, as attributes, and its events: name, time in ns since the epoch, attributes."""
        if self._recording:
            self._span.set_attributes(dict(_flat("dsde", figures)))
            for name, at, attributes in events:
                self._span.add_event(name, attributes, at)

    def end(self, error: BaseException | None = None) -> None:
        """End the span; `error`: what ended the request early."""
        if self._recording:
            self._span.set_attribute(gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS, sum(self._tokens.values()))
            if self._reasons:
                reasons = [self._reasons[index] for index in sorted(self._reasons)]
                self._span.set_attribute(gen_ai.GEN_AI_RESPONSE_FINISH_REASONS, reasons)
            if self._text:
                answers = [self._text[index] for index in sorted(self._text)]
                self._span.set_attribute(gen_ai.GEN_AI_OUTPUT_MESSAGES, _messages("assistant", answers))
            if error is not None:
                self._span.set_attribute(ERROR_TYPE, type(error).__name__)
                self._span.set_status(Status(StatusCode.ERROR, str(error) or None))
        self._span.end()


def _messages(role: str, texts: Sequence[str]) -> str:
    parts = [{"role": role, "parts": [{"type": "text", "content": text[:_LONGEST_CONTENT]}]} for text in texts]
    return json.dumps(parts, ensure_ascii=False)


def _flat(prefix: str, tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}.{name}"
        flat += _flat(key, value) if isinstance(value, Mapping) else [] if value is None else [(key, value)]
    return flat
