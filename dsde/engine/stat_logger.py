"""Where vLLM's front end hands over what the scheduler's process sent: the metrics' ear on the engine."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase, StatLoggerFactory
from vllm.v1.metrics.stats import SchedulerStats

from dsde.engine.transport import take_step
from dsde.telemetry.metrics import Metrics
from dsde.telemetry.setup import Telemetry

__all__ = ["stat_loggers"]


class _StepLogger(StatLoggerBase):
    """Books each engine step on `metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def record(self, scheduler_stats: SchedulerStats | None, *_: Any, **__: Any) -> None:
        if scheduler_stats is None:
            return
        self._metrics.load(scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs)
        step = take_step(scheduler_stats)
        if step is not None:
            self._metrics.step(step)

    def log_engine_initialized(self) -> None:
        """Ray and vLLM say so themselves."""


def stat_loggers(telemetry: Telemetry) -> list[StatLoggerFactory]:
    """vLLM's `stat_loggers` argument. Ours comes first: it takes out what vLLM's own loggers do not know."""
    loggers: list[StatLoggerFactory] = [lambda config, index: _StepLogger(telemetry.metrics)]
    if telemetry.registry:
        from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

        loggers.append(RayPrometheusStatLogger)
    return loggers
