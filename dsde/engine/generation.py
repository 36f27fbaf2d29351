"""Requests that did not come over HTTP, on the path of those that did: vLLM's own request types, checks, renderer.

What the OpenAI application does between a body and the engine client happens here with the same objects; what it makes
of the outputs is left to the caller.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.tracing import contains_trace_headers, extract_trace_headers

from dsde.engine.hint import note_hint
from dsde.engine.refusal import RequestRefused
from dsde.engine.remote import EnginesFull
from dsde.engine.retry import RequestLost

__all__ = ["Generation", "TextGeneration", "refusal"]

logger = logging.getLogger("ray.serve")

_INTERNAL = "internal error; the server's log says more under this request's id"


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted request.

    request_id: as the caller gave it or vLLM made it.
    num_prompt_tokens: tokens of the rendered prompt.
    outputs: vLLM's outputs: deltas where the body says `stream`, else the final one. It raises RequestRefused;
        closing it aborts the request.
    """

    request_id: str
    num_prompt_tokens: int
    outputs: AsyncGenerator[RequestOutput, None]


class TextGeneration:
    """Takes OpenAI bodies for the model of a vLLM OpenAI application.

    client: the application's engine client. state: its state, as init_app_state() filled it.
    """

    def __init__(self, client: EngineClient, state: State) -> None:
        self._client = client
        self._models = state.openai_serving_models
        self._chat = state.openai_serving_chat
        self._completion = state.openai_serving_completion

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return str(self._models.model_name())

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return int(self._client.model_config.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary in tokens."""
        return int(self._client.model_config.get_vocab_size())

    async def healthy(self) -> bool:
        """Whether an engine can answer."""
        try:
            await self._client.check_health()
        except Exception:
            return False
        return True

    async def start(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Generation:
        """Check and render a body of /v1/chat/completions (it has `messages`) or /v1/completions, and start it.

        headers: those that came with it, lower-case names; trace context and hint among them go on to the engine.
        Raises RequestRefused.
        """
        try:
            return await self._start(body, headers)
        except Exception as error:
            raise refusal(error, started=False) from error

    async def _start(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Generation:
        note_hint(headers)
        request: ChatCompletionRequest | CompletionRequest
        reasoning: dict[str, Any] = {}
        if "messages" in body:
            serving, prefix = self._chat, "chatcmpl"
            request = ChatCompletionRequest(**body)
            rendered = _accepted(await serving.render_chat_request(request))[1]
            max_tokens = request.max_completion_tokens
            # As for a chat over HTTP without a reasoning parser; it decides where a grammar takes hold.
            reasoning["reasoning_ended"] = request.resolve_reasoning_ended(None, [])
        else:
            serving, prefix = self._completion, "cmpl"
            request = CompletionRequest(**body)
            rendered = _accepted(await serving.render_completion_request(request))
            max_tokens = request.max_tokens
        (prompt,) = rendered
        num_prompt_tokens = len(prompt["prompt_token_ids"])
        params = request.to_sampling_params(
            get_max_tokens(
                self.max_model_len,
                max_tokens,
                num_prompt_tokens,
                serving.default_sampling_params,
                serving.override_max_tokens,
            ),
            serving.default_sampling_params,
        )
        outputs = self._client.generate(
            prompt,
            params,
            # As over HTTP, where the prefix tells logs and spans which of the two it is.
            f"{prefix}-{request.request_id}",
            trace_headers=extract_trace_headers(headers) if contains_trace_headers(headers) else None,
            **reasoning,
        )
        return Generation(request.request_id, num_prompt_tokens, _refusing(outputs, request.request_id))


async def _refusing(
    outputs: AsyncGenerator[RequestOutput, None], request_id: str
) -> AsyncGenerator[RequestOutput, None]:
    started = False
    try:
        async for output in outputs:
            if any(one.finish_reason == "error" for one in output.outputs):
                logger.error("request %s failed in the engine", request_id)
                raise RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, _INTERNAL)
            started = True
            yield output
    except Exception as error:
        raise refusal(error, started) from error
    finally:
        await outputs.aclose()


def _accepted(rendered: Any) -> Any:
    if isinstance(rendered, ErrorResponse):
        error = rendered.error
        raise RequestRefused(error.code, error.message, error.param)
    return rendered


def refusal(error: Exception, started: bool) -> RequestRefused:
    """What a caller is told about `error`, with the status of the OpenAI API.

    started: tokens have come; a raw ValueError is then no longer the request's fault. What nobody foresaw is a 500
    whose text says nothing of it.
    """
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, ValidationError):
        return _malformed(error)
    if isinstance(error, VLLMValidationError):
        return RequestRefused(HTTPStatus.BAD_REQUEST, sanitize_message(_with_value(error)), error.parameter)
    if isinstance(error, RetryableRequestError) and isinstance(error.__cause__, EnginesFull):
        return RequestRefused(HTTPStatus.TOO_MANY_REQUESTS, str(error))
    if isinstance(error, GenerationError) and isinstance(error.__cause__, RequestLost):
        return RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
    if isinstance(error, VLLMError | NotImplementedError) or (type(error) is ValueError and not started):
        told = create_error_response(error).error
        if told.code != HTTPStatus.INTERNAL_SERVER_ERROR:
            return RequestRefused(told.code, told.message, told.param)
    return RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, _INTERNAL)


def _with_value(error: VLLMValidationError) -> str:
    message = str(error.args[0])
    value = str(error.value)
    return message if error.value is None or value in message else f"{message} (got {value[:200]})"


def _malformed(error: ValidationError) -> RequestRefused:
    first = error.errors(include_url=False, include_context=False)[0]
    parameter = clean_loc_for_param(first["loc"])
    value = first["input"]
    shown = repr(value)[:200] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return RequestRefused(HTTPStatus.BAD_REQUEST, f"{parameter} = {shown}: {first['msg']}", parameter)
