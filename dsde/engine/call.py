"""What goes to an engine, and how it fails to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

__all__ = ["EngineDied", "EngineUnavailable", "EnginesFull", "Generate", "GenerateCall"]


class EngineUnavailable(Exception):
    """No engine took the request, or the one that did went away; the caller may send it again.

    replica: the name of the one to keep away from, where it is known.
    """

    def __init__(self, message: str, replica: str | None = None) -> None:
        super().__init__(message)
        self.replica = replica


class EnginesFull(EngineUnavailable):
    """Every engine's queue is full."""


class EngineDied(EngineUnavailable):
    """An engine died while it had the request, which may be why it died."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One request on its way to an engine; every part pickles.

    prompt: vLLM's engine input (`type`, `prompt_token_ids`, ...) without the prompt's text.
    sampling_params: as the OpenAI layer made them, the `dsde_*` options in extra_args.
    request_id: the id the answer carries; an engine makes its own unique one from it.
    priority: lower is sooner, used by engines with priority scheduling.
    emitted: token ids of the answer that another engine gave before it died; the answer goes on behind them.
    avoid: names of the replicas whose engine was dead when they had this request; their list outlives them a while.
    """

    prompt: Mapping[str, Any]
    sampling_params: SamplingParams
    request_id: str
    priority: int = 0
    lora_request: LoRARequest | None = None
    trace_headers: Mapping[str, str] | None = None
    session_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    emitted: tuple[int, ...] = ()
    avoid: tuple[str, ...] = ()


Generate = Callable[[GenerateCall], AsyncGenerator[RequestOutput, None]]
