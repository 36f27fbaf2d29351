"""What a request is refused for before an engine has it, beyond its form, which vLLM's own types check.

vLLM finds some of these where the engine runs. By then a streaming answer has sent its 200, and another machine has had
the trouble.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from difflib import get_close_matches
from typing import Any

from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import ResponsesRenderResult
from vllm.sampling_params import SamplingParams

from dsde.config import LimitsConfig

__all__ = ["check_rendering", "check_sampling"]

# Of OpenAI's API, without a part in what is generated here; vLLM does not know them.
_IGNORED = {
    *("metadata", "modalities", "prediction", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "store", "verbosity"),
}
_LONGEST_ID = 128
_STRUCTURES = ("structured_outputs", "response_format", "text")


def check_rendering(state: State, client: EngineClient, limits: LimitsConfig) -> None:
    """Check every request of the OpenAI application around the rendering of its prompt.

    state: as init_app_state() filled it. The requests that are checked raise VLLMValidationError, which is a 400.
    """
    renderer = state.online_renderer
    renderer.render_chat = _checked(renderer.render_chat, client, limits)
    renderer.render_completion = _checked(renderer.render_completion, client, limits)
    renderer.render_responses = _checked(renderer.render_responses, client, limits)


def check_sampling(params: SamplingParams, prompt_ids: list[int] | None, client: EngineClient) -> None:
    """Raise VLLMValidationError for no prompt, and for token ids and numbers of log-probabilities beyond the model's.

    A grammar is not compiled here; check_rendering() has seen to that.
    """
    params.verify(client.model_config, None, None, client.renderer.tokenizer)
    if params.bad_words:
        params.update_from_tokenizer(client.renderer.tokenizer)
    if prompt_ids is not None and not prompt_ids:
        raise VLLMValidationError("prompt is empty; accepted: at least one token", parameter="prompt")
    if prompt_ids:
        client.renderer.validate_token_ids(prompt_ids)


def _checked(
    render: Callable[..., Awaitable[Any]], client: EngineClient, limits: LimitsConfig
) -> Callable[..., Awaitable[Any]]:
    async def render_checked(request: Any, *args: Any, **kwargs: Any) -> Any:
        _check_fields(request)
        if isinstance(request, ResponsesRequest):
            _fill_in(request)
        _check_size(request, limits)
        field = _field_of_structure(request)
        rendered = await render(request, *args, **kwargs)
        # Only now does the request have the grammar that its tools ask for.
        structure = request.extract_structured_outputs()
        if structure is not None:
            await _check_structure(structure, client, field)
        if isinstance(request, ResponsesRequest) and isinstance(rendered, ResponsesRenderResult):
            # Its stream begins before the engine client hears of it; a call that nobody reads is checked all the same.
            client.generate(rendered.engine_input, request.to_sampling_params(1), request.request_id)
        return rendered

    return render_checked


def _check_fields(request: Any) -> None:
    for name in sorted((request.model_extra or {}).keys() - _IGNORED):
        close = get_close_matches(name[:64], type(request).model_fields, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise VLLMValidationError(f"{name[:64]} is no field of this request{meant}", parameter=name[:64])
    for token, bias in (request.logit_bias or {}).items():
        if not math.isfinite(bias):
            raise VLLMValidationError(
                f"logit_bias.{token[:64]} = {bias}: accepted: a finite number", parameter="logit_bias"
            )
    for name in ("messages", "input"):
        if getattr(request, name, None) == []:
            raise VLLMValidationError(f"{name} is empty; accepted: at least one message", parameter=name)
    longest = getattr(request, "max_output_tokens", None)
    if longest is not None and longest < 1:
        raise VLLMValidationError(
            f"max_output_tokens = {longest}: accepted: an integer from 1", parameter="max_output_tokens"
        )
    if len(request.request_id) > _LONGEST_ID:
        raise VLLMValidationError(
            f"request_id has {len(request.request_id)} characters; accepted: at most {_LONGEST_ID}",
            parameter="request_id",
        )


def _fill_in(request: ResponsesRequest) -> None:
    """Take null for absent: vLLM fails on some of these once the engine has answered."""
    for name in request.model_fields_set & type(request).model_fields.keys():
        field = type(request).model_fields[name]
        if getattr(request, name) is None and not field.is_required() and field.default is not None:
            setattr(request, name, field.get_default(call_default_factory=True))


def _field_of_structure(request: Any) -> str:
    given = [name for name in _STRUCTURES if getattr(request, name, None) is not None]
    return given[0] if given else "tools"


async def _check_structure(structure: Any, client: EngineClient, field: str) -> None:
    params = SamplingParams(structured_outputs=structure)
    config = client.vllm_config.structured_outputs_config
    try:
        # In a thread: a large schema takes a while to read.
        await asyncio.to_thread(params.verify, client.model_config, None, config, client.renderer.tokenizer)
    except VLLMValidationError as error:
        raise VLLMValidationError(f"{field}: {error.args[0]}", parameter=field) from error


def _check_size(request: Any, limits: LimitsConfig) -> None:
    prompts, n = _prompts(getattr(request, "prompt", None)), getattr(request, "n", None) or 1
    if prompts * n > limits.sequences:
        raise VLLMValidationError(
            f"n = {n} with {prompts} prompt(s): accepted: {limits.sequences} sequences (limits.sequences)",
            parameter="n" if n > 1 else "prompt",
        )
    structure = request.extract_structured_outputs()
    if structure is not None and (size := _written(structure)) > limits.grammar_kib * 2**10:
        field = _field_of_structure(request)
        raise VLLMValidationError(
            f"{field} has {size} characters; accepted: limits.grammar_kib = {limits.grammar_kib} KiB", parameter=field
        )


def _prompts(prompt: Any) -> int:
    """How many prompts vLLM makes of the field of that name: it takes text, token ids, or a list of either."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _written(structure: Any) -> int:
    """The length of a structure as its request has it."""
    parts = (structure.json, structure.regex, structure.choice, structure.grammar, structure.structural_tag)
    return sum(len(part if isinstance(part, str) else json.dumps(part)) for part in parts if part is not None)
