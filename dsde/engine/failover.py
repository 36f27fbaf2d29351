"""Requests that outlive their engines: the next engine goes on where the last one died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from vllm.outputs import RequestOutput

from dsde.engine.call import EngineDied, EngineUnavailable, Generate, GenerateCall
from dsde.engine.continuation import Continuation
from dsde.engine.retry import Retries, RetryBudget

__all__ = ["Failover"]

logger = logging.getLogger("ray.serve")


class Failover:
    """A `generate` that tries again within `budget`, over one that does not. sleep: waits seconds."""

    def __init__(
        self, generate: Generate, budget: RetryBudget, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._generate = generate
        self._budget = budget
        self._sleep = sleep

    async def generate(self, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        """Stream one request's outputs, each token once, whatever becomes of the engines under it.

        Raises RequestLost or EngineUnavailable where it cannot go on, and vLLM's own errors as they come.
        """
        answer, retries, sent = Continuation(call), Retries(self._budget), call
        while True:
            outputs = self._generate(sent)
            finished = False
            try:
                async for output in outputs:
                    answer.take(output)
                    finished = output.finished
                    if finished:
                        self._budget.answered()
                    yield output
                if finished:
                    return
                raise EngineDied("the engine of this request broke off; send it again")
            except EngineUnavailable as error:
                avoid = sent.avoid if error.replica is None else (*sent.avoid, error.replica)
                sent = replace(answer.next_call(), avoid=avoid)
                delay_s = retries.delay_s(error)
                logger.warning(
                    "request %s goes on behind %d tokens in %.2f s: %s",
                    call.request_id,
                    answer.num_emitted,
                    delay_s,
                    error,
                )
            finally:
                await outputs.aclose()
            await self._sleep(delay_s)
