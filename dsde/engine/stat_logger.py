"""Where vLLM's front end hands over what the scheduler's process sent: an engine's load and its steps."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase, StatLoggerFactory
from vllm.v1.metrics.stats import SchedulerStats

from dsde.engine.transport import take_step
from dsde.telemetry.setup import Telemetry

__all__ = ["EngineLoad"]


class EngineLoad(StatLoggerBase):
    """The newest of vLLM's scheduler statistics. running, waiting: requests. kv_use: share of the KV cache in use.

    steps: outputs that the engine has sent. telemetry: where load and steps are booked as well, None for nowhere.
    """

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self.running = self.waiting = self.steps = 0
        self.kv_use = 0.0
        self._telemetry = telemetry

    def record(self, scheduler_stats: SchedulerStats | None, *_: Any, **__: Any) -> None:
        """Called by vLLM after every step."""
        self.steps += 1
        if scheduler_stats is None:
            return
        self.running = scheduler_stats.num_running_reqs
        self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.kv_use = scheduler_stats.kv_cache_usage
        if self._telemetry is not None:
            self._telemetry.metrics.load(self.running, self.waiting)
            step = take_step(scheduler_stats)
            if step is not None:
                self._telemetry.metrics.step(step)

    def log_engine_initialized(self) -> None:
        """Ray and vLLM say so themselves."""

    def loggers(self) -> list[StatLoggerFactory]:
        """vLLM's `stat_loggers` argument. This one comes first: it takes out what vLLM's own loggers do not know."""
        loggers: list[StatLoggerFactory] = [lambda config, index: self]
        if self._telemetry is not None and self._telemetry.registry:
            from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

            loggers.append(RayPrometheusStatLogger)
        return loggers
