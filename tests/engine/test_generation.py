"""What a caller is told about vLLM's errors; no engine runs here."""

from __future__ import annotations

import inspect

import pytest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMNotFoundError, VLLMValidationError

from dsde.engine.generation import refusal
from dsde.engine.remote import EnginesFull, EngineUnavailable
from dsde.engine.retry import RequestLost


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (VLLMValidationError("top_p is bad", parameter="top_p"), 400),
        (VLLMNotFoundError("no such model"), 404),
        (NotImplementedError("sleep"), 501),
        (caused(RetryableRequestError("full"), EnginesFull("full")), 429),
        (caused(RetryableRequestError("away"), EngineUnavailable("away")), 503),
        (GenerationError("Internal server error"), 500),
        (KeyError("a defect"), 500),
        (TypeError("a defect"), 500),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "a defect"), 500),
    ],
)
def test_an_error_has_the_status_of_the_openai_api(error: Exception, status: int) -> None:
    refused = refusal(error, started=False)
    assert refused.status == status
    if status == 500:
        assert "defect" not in refused.message
        assert refused.message.startswith("internal error")


def test_a_request_that_engines_died_with_is_told_so() -> None:
    lost = RequestLost("2 engines died while they had this request; it is not tried again")
    told = refusal(caused(GenerationError(str(lost)), lost), started=True)
    assert (told.status, told.message) == (500, str(lost))


def test_a_plain_value_error_is_the_request_s_only_before_it_runs() -> None:
    error = ValueError("Token id 9 is out of vocabulary")
    assert refusal(error, started=False).status == 400
    assert refusal(error, started=True).status == 500


def test_the_value_is_told_where_vllm_leaves_it_out() -> None:
    told = refusal(VLLMValidationError("must be positive", parameter="logprobs", value=-3), started=False)
    assert (told.message, told.parameter) == ("must be positive (got -3)", "logprobs")


def test_a_malformed_field_is_told_in_one_line() -> None:
    with pytest.raises(Exception, match="seed") as error:
        CompletionRequest(prompt="x", seed=2**70)
    told = refusal(error.value, started=False)
    assert told.parameter == "seed"
    assert told.message.startswith(f"seed = {2**70}: Input should be less than or equal to")
    assert "\n" not in told.message


def test_vllm_has_what_stands_between_a_body_and_the_engine() -> None:
    for serving, render in (
        (OpenAIServingChat, "render_chat_request"),
        (OpenAIServingCompletion, "render_completion_request"),
    ):
        source = inspect.getsource(serving)
        wanted = (f"def {render}(", "self.default_sampling_params = ", "self.override_max_tokens = ")
        assert [one for one in wanted if one not in source] == []
    assert list(inspect.signature(get_max_tokens).parameters)[:5] == [
        "max_model_len",
        "max_tokens",
        "input_length",
        "default_sampling_params",
        "override_max_tokens",
    ]
