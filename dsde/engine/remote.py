"""vLLM's EngineClient over an engine that lives elsewhere.

The client renders, validates and finishes answers; one asynchronous `generate` callable does the rest, and how it
reaches an engine is its own affair. Token ids and sampling parameters cross, text does not.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor

from dsde.access.gate import Admission, admission
from dsde.engine.call import EnginesFull, EngineUnavailable, Generate, GenerateCall
from dsde.engine.checks import check_sampling
from dsde.engine.disconnect import closed_with_request
from dsde.engine.failover import Failover
from dsde.engine.figures import attach_figures
from dsde.engine.hint import with_hint
from dsde.engine.options import parse
from dsde.engine.retry import RequestLost, RetryBudget
from dsde.engine.transport import EVENTS_KEY, FIGURES_KEY
from dsde.telemetry.tracing import RequestSpan

__all__ = ["EngineUnavailable", "EnginesFull", "Generate", "GenerateCall", "RemoteEngineClient", "trace_output"]


class RemoteEngineClient(EngineClient):
    """An EngineClient for vLLM's OpenAI application.

    generate: streams one request's outputs. Closing the generator must abort the request. It raises vLLM's own errors
        as they are, and EngineUnavailable when no engine can answer; the request is then tried again.
    check_engines: raises EngineUnavailable when no engine is healthy.
    max_length: longest speculation length in draft tokens.
    max_retries: requests that may be tried again at once.
    record_content: whether a traced request's span records its prompt and its answer.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        generate: Generate,
        check_engines: Callable[[], Awaitable[None]],
        max_length: int,
        *,
        max_retries: int = 128,
        record_content: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._generate = Failover(generate, RetryBudget(max_retries)).generate
        self._check_engines = check_engines
        self._max_length = max_length
        self._record_content = record_content

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check the request at once, then stream its outputs.

        Not a coroutine: a refused option must raise before a streaming answer has sent its status. Raises
        VLLMValidationError for a bad `dsde_*` option, a bad hint in a header, a cache-transfer parameter or a token id
        that the model lacks, TypeError for a prompt that vLLM's renderer did not make.
        """
        sampling_params.extra_args = with_hint(sampling_params.extra_args)
        parse(sampling_params.extra_args, self._max_length)
        for field in ("kv_transfer_params", "ec_transfer_params"):
            if field in (sampling_params.extra_args or {}):
                raise VLLMValidationError(f"{field} is not accepted: these engines share no cache", parameter=field)
        if not isinstance(prompt, dict) or "type" not in prompt:
            raise TypeError(f"prompt is a {type(prompt).__name__}: a remote engine takes the renderer's engine inputs")
        check_sampling(sampling_params, prompt.get("prompt_token_ids"), self)
        call = GenerateCall(
            prompt={key: value for key, value in prompt.items() if key != "prompt"},
            sampling_params=sampling_params,
            request_id=request_id,
            priority=priority,
            lora_request=lora_request,
            trace_headers=dict(trace_headers) if trace_headers else None,
            session_id=session_id,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )
        return closed_with_request(self._stream(call, prompt_text or prompt.get("prompt"), admission()))

    async def _stream(
        self, call: GenerateCall, prompt_text: str | None, admitted: Admission
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt_ids = call.prompt.get("prompt_token_ids")
        admitted.charge(len(prompt_ids or ()))
        span = self._span(call)
        span.prompt(len(prompt_ids or ()), prompt_text)
        outputs = self._generate(replace(call, trace_headers=span.headers or None))
        error: BaseException | None = None
        try:
            while True:
                # Current only while the engine is asked: what is yielded from here runs in the caller's own context.
                with span.current():
                    output = await anext(outputs, None)
                if output is None:
                    break
                output.prompt = prompt_text
                output.prompt_token_ids = prompt_ids
                admitted.charge(sum(len(answer.token_ids) for answer in output.outputs))
                trace_output(span, output, call.sampling_params)
                attach_figures(output, self._max_length)
                yield output
        except EngineUnavailable as raised:
            error = raised
            raise RetryableRequestError(str(raised)) from raised
        except RequestLost as raised:
            error = raised
            raise GenerationError(str(raised)) from raised
        except BaseException as raised:
            # A generator that is closed after the last output has not failed.
            error = None if isinstance(raised, GeneratorExit) and span.finished else raised
            if isinstance(error, GeneratorExit | CancelledError):
                admitted.charge(_unseen(call.sampling_params))
            raise
        finally:
            span.end(error)
            await outputs.aclose()

    def _span(self, call: GenerateCall) -> RequestSpan:
        model = str(self.model_config.served_model_name)
        return RequestSpan(
            model, call.request_id, call.sampling_params, call.trace_headers, content=self._record_content
        )

    async def check_health(self) -> None:
        """Raise EngineDeadError, which the OpenAI application answers as 503, when no engine is healthy."""
        try:
            await self._check_engines()
        except EngineUnavailable as error:
            raise EngineDeadError() from error

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    # Engines come and go behind this client: it never dies with one of them, and check_health is where they are asked.
    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        return EngineDeadError()

    async def is_tracing_enabled(self) -> bool:
        """True, so that vLLM's application hands over a client's trace headers; whether anybody traces shows later."""
        return True

    async def do_log_stats(self) -> None:
        """Engines log their own."""

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        """Nothing is pinned: this client knows no KV connector."""

    async def is_paused(self) -> bool:
        return False

    async def is_sleeping(self) -> bool:
        return False

    async def abort(self, request_id: str | Iterable[str]) -> None:
        raise _refused("abort: close the request's generator")

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        raise _refused("encode")

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        raise _refused("start_profile")

    async def stop_profile(self) -> None:
        raise _refused("stop_profile")

    async def reset_mm_cache(self) -> None:
        raise _refused("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        raise _refused("reset_encoder_cache")

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        raise _refused("reset_prefix_cache")

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        raise _refused("sleep")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        raise _refused("wake_up")

    async def release_kv_cache_memory(self) -> None:
        raise _refused("release_kv_cache_memory")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        raise _refused("add_lora")

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        raise _refused("pause_generation")

    async def resume_generation(self) -> None:
        raise _refused("resume_generation")


def trace_output(span: RequestSpan, output: RequestOutput, sampling: SamplingParams) -> None:
    """Tell the span of one output, before its figures leave the place where they came in.

    A request for several answers has no figures of its own.
    """
    cumulative = sampling.output_kind is RequestOutputKind.CUMULATIVE
    for answer in output.outputs:
        span.tokens(answer.index, len(answer.token_ids), answer.text, answer.finish_reason, cumulative=cumulative)
    carried = output.kv_transfer_params
    if output.finished and sampling.n == 1 and carried and FIGURES_KEY in carried:
        span.figures(carried[FIGURES_KEY], carried.get(EVENTS_KEY, ()))


def _unseen(params: SamplingParams) -> int:
    """Tokens to count for a request that its client dropped: all that it could have had, where none was seen."""
    return (params.max_tokens or 0) * params.n if params.output_kind is RequestOutputKind.FINAL_ONLY else 0


def _refused(call: str) -> NotImplementedError:
    return NotImplementedError(f"{call}: not offered by an engine behind a remote client")
