"""One vLLM engine in this process's care: start, generate, health, policy, stop."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from dsde.config import DsdeConfig
from dsde.engine.plugin import engine_arguments
from dsde.engine.remote import EngineUnavailable, GenerateCall
from dsde.engine.stat_logger import stat_loggers
from dsde.engine.transport import FIGURES_KEY
from dsde.telemetry.metrics import FinishedRequest
from dsde.telemetry.setup import Telemetry
from dsde.telemetry.tracing import headers_of, operation_of

__all__ = ["EngineStartError", "LocalEngine", "finished_request"]

# A line that names an exception, after the process and time that vLLM writes before it.
_EXCEPTION_LINE = re.compile(
    r"^(?:\([\w ]+pid=\d+\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)\b: .+)$", re.MULTILINE
)


class EngineStartError(RuntimeError):
    """The engine did not start; the text is the cause, in one line."""


class LocalEngine:
    """An AsyncLLM under DSDE control. telemetry: where its requests and steps are booked, None for nowhere."""

    def __init__(self, engine: AsyncLLM, telemetry: Telemetry | None = None) -> None:
        self._engine = engine
        self._telemetry = telemetry

    @classmethod
    def start(cls, config: DsdeConfig, telemetry: Telemetry | None = None) -> LocalEngine:
        """Load the models and start the engine's process; takes tens of seconds.

        Raises EngineStartError.
        """
        offsets = _output_sizes()
        arguments = engine_arguments(config)
        if telemetry is not None:
            arguments |= _telemetry_arguments(arguments, telemetry)
        loggers = None if telemetry is None else stat_loggers(telemetry)
        try:
            return cls(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=loggers), telemetry)
        except Exception as error:
            raise EngineStartError(_cause(offsets) or f"{type(error).__name__}: {error}") from error

    @property
    def vllm_config(self) -> VllmConfig:
        """The configuration as vLLM resolved it, for a RemoteEngineClient elsewhere."""
        return self._engine.vllm_config

    async def generate(self, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request; closing the generator or cancelling its task aborts it in the engine.

        Raises EngineUnavailable when the engine has died, VLLMValidationError for what it refuses.
        """
        traced = self._telemetry is not None and self._telemetry.traces_endpoint is not None
        start, last, error = time.perf_counter(), None, None
        outputs = self._engine.generate(
            dict(call.prompt),
            call.sampling_params,
            call.request_id,
            lora_request=call.lora_request,
            trace_headers=(headers_of() or call.trace_headers) if traced else None,
            priority=call.priority,
            session_id=call.session_id,
            reasoning_ended=call.reasoning_ended,
            reasoning_parser_kwargs=call.reasoning_parser_kwargs,
        )
        try:
            async for output in outputs:
                # The client has the prompt; sending it back with every token would cost more than the token.
                output.prompt = None
                output.prompt_token_ids = None
                last = output
                yield output
        except EngineDeadError:
            error = EngineDeadError.__name__
            raise EngineUnavailable("the engine of this request died; send it again") from None
        except (asyncio.CancelledError, GeneratorExit):
            error = None if last is not None and last.finished else "cancelled"
            raise
        except Exception as raised:
            error = type(raised).__name__
            raise
        finally:
            if self._telemetry is not None:
                self._telemetry.metrics.request(finished_request(call, last, time.perf_counter() - start, error))
            await outputs.aclose()

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine's process has died."""
        await self._engine.check_health()

    @property
    def num_unfinished_requests(self) -> int:
        """Requests this engine has not finished, waiting ones included."""
        return self._engine.get_num_unfinished_requests()

    async def set_policy(self, name: str, settings: Mapping[str, Any]) -> None:
        """Switch the policy of the requests that choose none themselves, from the next step on."""
        await self._engine.collective_rpc("set_speculation_policy", args=(name, dict(settings)))

    def shutdown(self) -> None:
        """Stop the engine's process and wait for it."""
        self._engine.shutdown()


def _telemetry_arguments(arguments: Mapping[str, Any], telemetry: Telemetry) -> dict[str, Any]:
    """What makes the engine send its steps and, where spans go somewhere, its own spans."""
    additional = arguments.get("additional_config") or {}
    changed: dict[str, Any] = {
        "additional_config": {**additional, "dsde": {**additional.get("dsde", {}), "telemetry": True}}
    }
    if telemetry.traces_endpoint is not None:
        changed["otlp_traces_endpoint"] = telemetry.traces_endpoint
    return changed


def finished_request(
    call: GenerateCall, last: RequestOutput | None, seconds: float, error: str | None
) -> FinishedRequest:
    """What the metrics want to know of a request whose latest output is `last`."""
    sampling = call.sampling_params
    structured = sampling.structured_outputs is not None
    stats = None if last is None else last.metrics
    answer = last.outputs[0] if last is not None and last.outputs else None
    later = 0 if stats is None else stats.num_generation_tokens - 1
    counted = None if answer is None else answer.spec_decode_metrics
    return FinishedRequest(
        operation=operation_of(call.request_id),
        request_class="structured" if structured else "sampled" if sampling.temperature > 0 else "greedy",
        duration_s=seconds,
        first_token_s=stats.first_token_latency if stats is not None and later >= 0 else None,
        per_token_s=(stats.last_token_ts - stats.first_token_ts) / later if stats is not None and later > 0 else None,
        error=error,
        figures=((last.kv_transfer_params if last is not None else None) or {}).get(FIGURES_KEY),
        drafted=0 if counted is None else counted.num_draft_tokens,
        accepted=0 if counted is None else sum(length * steps for length, steps in enumerate(counted.histogram)),
    )


def _output_sizes() -> dict[Path, int]:
    """Path and size in bytes of this process's stdout and stderr, where they are files."""
    paths = {Path(f"/proc/self/fd/{number}").resolve() for number in (1, 2)}
    return {path: path.stat().st_size for path in sorted(paths) if path.is_file()}


def _cause(offsets: Mapping[Path, int]) -> str | None:
    """The first exception that the engine's processes wrote after `offsets`.

    They inherit our output, and what vLLM raises here only points at it ("see root cause above").
    """
    for path, offset in offsets.items():
        with path.open(errors="replace") as output:
            output.seek(offset)
            if found := _EXCEPTION_LINE.search(output.read()):
                return found.group(1)
    return None
