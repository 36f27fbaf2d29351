"""A GenerateRequest as the body of an OpenAI request: the same fields under vLLM's names, nothing checked twice."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from deployments.proto.dsde.v1 import inference_pb2 as pb
from dsde.engine.refusal import RequestRefused

__all__ = ["BadField", "field_at_fault", "openai_body"]

_STRUCTURE = {"json_schema": "json", "regex": "regex"}
_ABOUT_STRUCTURE = re.compile("grammar|regex|json", re.IGNORECASE)
_LONGEST_VALUE = 200
_LONGEST_ID = 128
_OPTIONS = {field.name: f"vllm_xargs.dsde_{field.name}" for field in pb.SpeculationOptions.DESCRIPTOR.fields}
# OpenAI's name of a field, as vLLM's errors have it, to the message's.
_FIELDS = {
    **{field.name: f"sampling.{field.name}" for field in pb.SamplingParams.DESCRIPTOR.fields},
    **{name: f"speculation.{field}" for field, name in _OPTIONS.items()},
    "max_completion_tokens": "sampling.max_tokens",
    "top_logprobs": "sampling.logprobs",
    "messages": "chat.messages",
}


class BadField(RequestRefused):
    """A 400 about a field of the message itself, named by its own path."""

    def __init__(self, field: str, fault: str, accepted: str) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, f"{field} {fault}; accepted: {accepted}", field)


def openai_body(request: pb.GenerateRequest, stream: bool) -> dict[str, Any]:
    """The body of /v1/chat/completions for a chat, else of /v1/completions; absent fields stay absent.

    Raises BadField where the message says something that no body can say.
    """
    # Every message of a stream repeats it.
    if len(request.request_id) > _LONGEST_ID:
        raise BadField("request_id", f"has {len(request.request_id)} characters", f"at most {_LONGEST_ID}")
    body: dict[str, Any] = {"stream": stream, **_input(request), **_sampling(request)}
    for name in ("model", "request_id"):
        if request.HasField(name):
            body[name] = getattr(request, name)
    options = {f"dsde_{field.name}": value for field, value in request.speculation.ListFields()}
    if options:
        body["vllm_xargs"] = options
    return body


def _input(request: pb.GenerateRequest) -> dict[str, Any]:
    match request.WhichOneof("input"):
        case "prompt":
            return {"prompt": request.prompt}
        case "prompt_token_ids":
            ids = list(request.prompt_token_ids.ids)
            # vLLM reads an empty list as no prompt and a negative id as four errors.
            if not ids or min(ids) < 0:
                fault = "is empty" if not ids else f"holds {min(ids)}"
                raise BadField("prompt_token_ids.ids", fault, "at least one id, each of the model's vocabulary")
            return {"prompt": ids}
        case "chat":
            messages = [{"role": one.role, "content": one.content} for one in request.chat.messages]
            if not messages:
                raise BadField("chat.messages", "is empty", "at least one message")
            for number, message in enumerate(messages):
                if message["role"] not in ("system", "user", "assistant"):
                    field = f"chat.messages[{number}].role"
                    raise BadField(field, f"= {message['role']!r}", "system, user or assistant")
            return {"messages": messages}
    raise BadField("input", "is missing", "prompt, prompt_token_ids or chat")


def _sampling(request: pb.GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    given: dict[str, Any] = {
        field.name: list(value) if field.is_repeated else value for field, value in sampling.ListFields()
    }
    structure = sampling.WhichOneof("structure")
    if structure is not None:
        given["structured_outputs"] = {_STRUCTURE[structure]: given.pop(structure)}
    if request.WhichOneof("input") == "chat":
        if "max_tokens" in given:
            given["max_completion_tokens"] = given.pop("max_tokens")
        if "logprobs" in given:
            given["top_logprobs"] = given["logprobs"]
            given["logprobs"] = True
    return given


def field_at_fault(request: pb.GenerateRequest, refused: RequestRefused) -> tuple[str | None, str]:
    """(field, message): the message's field that `refused` is about, None where it is about none, and its text in
    the message's own names."""
    message, parameter = refused.message, refused.parameter
    if isinstance(refused, BadField):
        return parameter, message
    structure = request.sampling.WhichOneof("structure")
    if structure and (parameter == "structured_outputs" or (parameter is None and _ABOUT_STRUCTURE.search(message))):
        value = getattr(request.sampling, structure)
        shown = value if len(value) <= _LONGEST_VALUE else value[:_LONGEST_VALUE] + "..."
        return f"sampling.{structure}", f"sampling.{structure} = {shown!r}: {message}"
    for openai in _OPTIONS.values():
        message = message.replace(openai, _FIELDS[openai])
    field = _field(request, parameter or _named_in(message))
    return field, message if field is None or field in message else f"{field}: {message}"


def _field(request: pb.GenerateRequest, parameter: str | None) -> str | None:
    if parameter is None or parameter in _FIELDS:
        return _FIELDS.get(parameter or "")
    if parameter.startswith(("prompt", "input_")):
        return request.WhichOneof("input")
    name, dot, rest = parameter.partition(".")
    return _FIELDS.get(name, name) + dot + rest


def _named_in(message: str) -> str | None:
    """The field that a text is about; half of vLLM's refusals name it nowhere else."""
    if message.startswith("Token id "):
        return "prompt"
    # A plain word names a field only where the text begins with it.
    for position, word in enumerate(re.findall(r"[a-z_]+", message)):
        if word in _FIELDS and (position == 0 or "_" in word):
            return word
    return None
