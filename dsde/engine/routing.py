"""What a live engine tells routers: its load from vLLM's statistics, its costs and classes from finished requests.

The scheduler sends the costs it has learnt home with every finished request, as one more entry of
RequestOutput.kv_transfer_params, so nothing is asked for and nothing is sent while nothing happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from dsde.engine.remote import GenerateCall
from dsde.engine.transport import ENGINE_KEY, FIGURES_KEY
from dsde.routing.request import described
from dsde.routing.stats import ClassStats, ClassTable, ReplicaStats

__all__ = ["EngineLoad", "RoutingRecord"]

PRICED = frozenset({"goodput"})
"""Policies that draft as deep as pays."""
MEMORY = 0.9
"""Weight that averages over requests keep when another one finishes."""


class EngineLoad(StatLoggerBase):
    """The newest of vLLM's scheduler statistics: running, waiting: requests; kv_use: share of the KV cache."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.kv_use = 0.0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after every step."""
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_use = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def logger(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """Itself, as vLLM's factory of stat loggers."""
        return self


class RoutingRecord:
    """Gathers a replica's finished requests and makes its publications. slots: requests that decode together."""

    def __init__(self, slots: int, policy: str) -> None:
        self._slots = slots
        self._published = 0
        self._classes = ClassTable()
        self._costs: Mapping[str, Any] = {"verify": None, "draft": None, "policy": policy}
        self._length = self._share = 0.0

    def finish(self, call: GenerateCall, output: RequestOutput) -> None:
        """Take a request's last output in, and take the engine's costs off it."""
        carried = dict(output.kv_transfer_params or {})
        costs = carried.pop(ENGINE_KEY, None)
        if costs is not None:
            self._costs = costs
            output.kv_transfer_params = carried or None
        figures = carried.get(FIGURES_KEY)
        if figures is None or not output.outputs:
            return
        answer = output.outputs[0]
        counted = answer.spec_decode_metrics
        steps = 0 if counted is None else sum(counted.histogram)
        accepted = 0 if counted is None else sum(length * number for length, number in enumerate(counted.histogram))
        drafted = 0 if counted is None else counted.num_draft_tokens
        emitted = 1 + figures["steps"] + accepted
        request = described(call.prompt, call.sampling_params)
        self._classes.finish(request.classes, ClassStats(1.0, emitted, steps, drafted, accepted))
        self._length += (1.0 - MEMORY) * (figures["speculation_length"]["mean"] - self._length)
        times = output.metrics
        if times is not None and times.last_token_ts > times.first_token_ts:
            share = figures["straggler"]["wait_ms"] / (1e3 * (times.last_token_ts - times.first_token_ts))
            self._share += (1.0 - MEMORY) * (min(1.0, share) - self._share)

    def publish(self, load: EngineLoad, unfinished: int, *, draining: bool) -> ReplicaStats:
        """The next publication. unfinished: requests in the engine, which is the truth where vLLM's count is of a step
        that is over.
        """
        self._published += 1
        running = min(load.running, unfinished)
        return ReplicaStats(
            number=self._published,
            running=running,
            waiting=unfinished - running,
            slots=self._slots,
            kv_use=load.kv_use,
            verify_ms=None if self._costs["verify"] is None else (self._costs["verify"][0], self._costs["verify"][1]),
            draft_ms=self._costs["draft"],
            length=self._length,
            straggler_share=self._share,
            priced=self._costs["policy"] in PRICED,
            draining=draining,
            classes=self._classes.newest(),
        )
