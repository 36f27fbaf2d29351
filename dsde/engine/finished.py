"""What a request's latest output says of its decoding: the counts and times that metrics and routers share."""

from __future__ import annotations

from typing import NamedTuple

from vllm.outputs import RequestOutput

from dsde.engine.remote import GenerateCall
from dsde.engine.transport import FIGURES_KEY
from dsde.telemetry.metrics import FinishedRequest
from dsde.telemetry.tracing import operation_of

__all__ = ["Decoding", "decoding_of", "finished_request"]


class Decoding(NamedTuple):
    """steps: verification steps with drafts. drafted, accepted: draft tokens verified and accepted in them.

    seconds: from the first token to the last.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0


def decoding_of(output: RequestOutput) -> Decoding:
    """How the request of `output` has been decoded so far; zeros where nothing was measured."""
    counted = output.outputs[0].spec_decode_metrics if output.outputs else None
    times = output.metrics
    return Decoding(
        steps=0 if counted is None else sum(counted.histogram),
        drafted=0 if counted is None else counted.num_draft_tokens,
        accepted=0 if counted is None else sum(length * steps for length, steps in enumerate(counted.histogram)),
        seconds=0.0 if times is None else max(0.0, times.last_token_ts - times.first_token_ts),
    )


def finished_request(
    call: GenerateCall, last: RequestOutput | None, seconds: float, error: str | None
) -> FinishedRequest:
    """What the metrics want to know of a request whose latest output is `last`."""
    sampling = call.sampling_params
    structured = sampling.structured_outputs is not None
    stats = None if last is None else last.metrics
    later = 0 if stats is None else stats.num_generation_tokens - 1
    # Of several answers, one's figures and another's counts would come together.
    measured = None if sampling.n > 1 else last
    decoding = Decoding() if measured is None else decoding_of(measured)
    return FinishedRequest(
        operation=operation_of(call.request_id),
        request_class="structured" if structured else "sampled" if sampling.temperature > 0 else "greedy",
        duration_s=seconds,
        first_token_s=stats.first_token_latency if stats is not None and later >= 0 else None,
        per_token_s=decoding.seconds / later if later > 0 and measured is not None else None,
        decoding_s=decoding.seconds,
        error=error,
        figures=((measured.kv_transfer_params if measured is not None else None) or {}).get(FIGURES_KEY),
        drafted=decoding.drafted,
        accepted=decoding.accepted,
    )
