"""One vLLM engine in this process's care: start, generate, health, policy, stop."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from dsde.config import DsdeConfig
from dsde.engine.call import EngineDied, EngineUnavailable, GenerateCall
from dsde.engine.deadline import StartDeadline, StepDeadline
from dsde.engine.finished import finished_request
from dsde.engine.plugin import engine_arguments
from dsde.engine.routing import RoutingRecord
from dsde.engine.stat_logger import EngineLoad
from dsde.engine.transport import EMITTED_KEY, FIGURES_KEY
from dsde.engine.vllm_internals import continue_texts, end_engine, take_without_drafts
from dsde.routing.stats import ReplicaStats
from dsde.telemetry.setup import Telemetry
from dsde.telemetry.tracing import headers_of

__all__ = ["EngineStartError", "LocalEngine"]

logger = logging.getLogger("ray.serve")

# A line that names an exception, after the process and time that vLLM writes before it.
_EXCEPTION_LINE = re.compile(
    r"^(?:\([\w ]+pid=\d+\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)\b: .+)$", re.MULTILINE
)


class EngineStartError(RuntimeError):
    """The engine did not start; the text is the cause, in one line."""


class LocalEngine:
    """An AsyncLLM under DSDE control.

    deadline: tells when the engine is stuck. name: the replica's, which the figures of its answers carry. telemetry:
    where its requests and steps are booked, None for nowhere.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        load: EngineLoad,
        routing: RoutingRecord,
        deadline: StepDeadline,
        name: str,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._engine = engine
        self._name = name
        continue_texts(engine.output_processor)
        self._load, self._routing, self._deadline = load, routing, deadline
        self._telemetry = telemetry
        self._open_calls = 0

    @classmethod
    def start(cls, config: DsdeConfig, name: str, telemetry: Telemetry | None = None) -> LocalEngine:
        """Load the models and start the engine's process; takes tens of seconds.

        Raises EngineStartError.
        """
        offsets = _output_sizes()
        arguments = engine_arguments(config)
        if telemetry is not None:
            arguments |= _telemetry_arguments(arguments, telemetry)
        load, routing = EngineLoad(telemetry), RoutingRecord(config.engine.max_num_seqs, config.speculation.policy)
        # Without statistics nobody hears of steps.
        silent = arguments.get("disable_log_stats", False)
        deadline = StepDeadline(math.inf if silent else config.engine.step_timeout_s)
        start = StartDeadline(config.engine.start_timeout_s)
        try:
            with start:
                engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=load.loggers())
            take_without_drafts(engine.input_processor)
            return cls(engine, load, routing, deadline, name, telemetry)
        except Exception as error:
            if start.passed:
                waited = f"{config.engine.start_timeout_s:g}"
                raise EngineStartError(f"engine.start_timeout_s = {waited}: not ready in that time") from error
            raise EngineStartError(_cause(offsets) or f"{type(error).__name__}: {error}") from error

    @property
    def vllm_config(self) -> VllmConfig:
        """The configuration as vLLM resolved it, for a RemoteEngineClient elsewhere."""
        return self._engine.vllm_config

    async def ready(self, timeout_s: float) -> None:
        """Wait for the engine's first word, without which vLLM does not begin a request, nor hears that it died.

        Raises EngineStartError where it does not come within `timeout_s` seconds.
        """
        try:
            await asyncio.wait_for(self._engine.get_supported_tasks(), timeout_s)
        except TimeoutError:
            raise EngineStartError(f"the engine said nothing for {timeout_s:g} s") from None

    async def generate(self, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request; closing the generator or cancelling its task aborts it in the engine.

        Raises EngineDied when the engine dies meanwhile, EngineUnavailable when it is dead already, VLLMValidationError
        for what it refuses.
        """
        was_dead = self._engine.errored
        traced = self._telemetry is not None and self._telemetry.traces_endpoint is not None
        start, last, error = time.perf_counter(), None, None
        outputs = self._engine.generate(
            dict(call.prompt),
            _parameters(call),
            call.request_id,
            lora_request=call.lora_request,
            trace_headers=(headers_of() or call.trace_headers) if traced else None,
            priority=call.priority,
            session_id=call.session_id,
            reasoning_ended=call.reasoning_ended,
            reasoning_parser_kwargs=call.reasoning_parser_kwargs,
        )
        self._open_calls += 1
        try:
            async for output in outputs:
                # The client has the prompt; sending it back with every token would cost more than the token.
                output.prompt = None
                output.prompt_token_ids = None
                if output.finished:
                    self._routing.finish(call, output)
                    if FIGURES_KEY in (output.kv_transfer_params or {}):
                        output.kv_transfer_params[FIGURES_KEY]["replica"] = self._name
                elif output.kv_transfer_params:
                    # What an output brings in case a stop string ends the request with it.
                    output.kv_transfer_params = None
                last = output
                yield output
        except EngineDeadError:
            error = EngineDeadError.__name__
            if was_dead:
                raise EngineUnavailable("the engine of this replica is dead; send it again", self._name) from None
            raise EngineDied("the engine of this request died; send it again", self._name) from None
        except (asyncio.CancelledError, GeneratorExit):
            error = None if last is not None and last.finished else "cancelled"
            raise
        except Exception as raised:
            error = type(raised).__name__
            raise
        finally:
            self._open_calls -= 1
            if self._telemetry is not None:
                self._telemetry.metrics.request(finished_request(call, last, time.perf_counter() - start, error))
            await outputs.aclose()

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine's process has died; end one that is stuck, so that it has."""
        unfinished = self.num_unfinished_requests
        if not self._engine.errored and self._deadline.overdue(self._load.steps, unfinished):
            logger.error("the engine has made no step for too long, and %d requests wait: it is ended", unfinished)
            end_engine(self._engine)
            raise EngineDeadError()
        await self._engine.check_health()

    @property
    def num_unfinished_requests(self) -> int:
        """Requests this engine has not finished, waiting ones included."""
        # The first ones wait for a word from the engine before vLLM counts them.
        return max(self._open_calls, self._engine.get_num_unfinished_requests())

    def routing_stats(self) -> ReplicaStats:
        """What routers are to know of this engine now; draining once it has died."""
        return self._routing.publish(self._load, self.num_unfinished_requests, draining=self._engine.errored)

    async def set_policy(self, name: str, settings: Mapping[str, Any]) -> None:
        """Switch the policy of the requests that choose none themselves, from the next step on."""
        await self._engine.collective_rpc("set_speculation_policy", args=(name, dict(settings)))

    def shutdown(self) -> None:
        """Stop the engine's process and wait for it."""
        self._engine.shutdown()


def _parameters(call: GenerateCall) -> SamplingParams:
    """The call's sampling parameters; the tokens that a continued request brings travel in them."""
    if not call.emitted:
        return call.sampling_params
    params = call.sampling_params.clone()
    params.extra_args = {**(params.extra_args or {}), EMITTED_KEY: list(call.emitted)}
    return params


def _telemetry_arguments(arguments: Mapping[str, Any], telemetry: Telemetry) -> dict[str, Any]:
    """What makes the engine send its steps and, where spans go somewhere, its own spans."""
    additional = arguments.get("additional_config") or {}
    changed: dict[str, Any] = {
        "additional_config": {**additional, "dsde": {**additional.get("dsde", {}), "telemetry": True}}
    }
    if telemetry.traces_endpoint is not None:
        changed["otlp_traces_endpoint"] = telemetry.traces_endpoint
    return changed


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
