"""vLLM's outputs as GenerateResponse messages. Reads their attributes; needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict

from deployments.proto.dsde.v1 import inference_pb2 as pb

__all__ = ["Answer"]

_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "repetition": pb.FINISH_REASON_REPETITION,
}


class Answer:
    """The messages of one request's answer, in order.

    top: how many of the likeliest tokens each place reports; None: no log-probabilities.
    """

    def __init__(self, request_id: str, model: str, num_prompt_tokens: int, top: int | None) -> None:
        self._request_id = request_id
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._top = top
        self._completion_tokens = 0

    def message(self, output: Any) -> pb.GenerateResponse | None:
        """The message of one RequestOutput; None where it brings nothing, as while a long prompt is read."""
        (completion,) = output.outputs
        self._completion_tokens += len(completion.token_ids)
        if not (completion.text or completion.token_ids or completion.finish_reason):
            return None
        message = pb.GenerateResponse(
            request_id=self._request_id, model=self._model, text=completion.text, token_ids=completion.token_ids
        )
        if self._top is not None and completion.logprobs is not None:
            for token_id, place in zip(completion.token_ids, completion.logprobs, strict=True):
                message.logprobs.append(_logprobs(token_id, place, self._top))
        if completion.finish_reason:
            self._finish(message, output, completion)
        return message

    def _finish(self, message: pb.GenerateResponse, output: Any, completion: Any) -> None:
        message.finish_reason = _FINISH_REASONS[completion.finish_reason]
        if isinstance(completion.stop_reason, str):
            message.stop = completion.stop_reason
        elif completion.stop_reason is not None:
            message.stop_token_id = completion.stop_reason
        message.usage.prompt_tokens = self._num_prompt_tokens
        message.usage.completion_tokens = self._completion_tokens
        if output.num_cached_tokens is not None:
            message.usage.cached_prompt_tokens = output.num_cached_tokens
        if completion.spec_decode_metrics is not None:
            # A figure that this version of the message lacks must not cost the answer.
            ParseDict(completion.spec_decode_metrics.to_dict(), message.speculation, ignore_unknown_fields=True)


def _logprobs(token_id: int, place: Mapping[int, Any], top: int) -> pb.TokenLogprobs:
    ranked = sorted((one.rank or 0, other, one) for other, one in place.items())
    return pb.TokenLogprobs(
        chosen=_logprob(token_id, place[token_id]),
        top=[_logprob(other, one) for rank, other, one in ranked if 0 < rank <= top],
    )


def _logprob(token_id: int, one: Any) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token_id, text=one.decoded_token or "", logprob=one.logprob, rank=one.rank)
