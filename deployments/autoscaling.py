"""How many engine replicas the load needs: the autoscaling policy that a Serve configuration names by import path.

A replica has as many places as requests can decode together in it: no more than its engine takes, than its KV cache
holds, and than leave its predicted step short enough. The load is every request that Serve has, queued ones included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsde.routing.stats import ReplicaStats

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

__all__ = ["EngineLoad", "places", "signals"]

_KV_NOISE = 0.05
"""Use of the KV cache below which it says nothing of what a request will need."""


def signals(stats: ReplicaStats) -> dict[str, float]:
    """What a replica reports.

    running: requests that decode. slots: requests that its engine takes. kv_use: share of the KV cache. step_ms,
    request_ms: a step of n requests is predicted to take step_ms + n request_ms; both are absent until the engine has
    measured its costs.
    """
    reported = {"running": float(stats.running), "slots": float(stats.slots), "kv_use": stats.kv_use}
    if stats.verify_ms is not None and stats.draft_ms is not None:
        base, token = stats.verify_ms
        reported["step_ms"] = base + stats.draft_ms * stats.length
        reported["request_ms"] = token * (1.0 + stats.length)
    return reported


def places(reported: Mapping[str, float], *, step_ms: float, kv_use: float) -> float:
    """Requests that can decode together in a replica, at least 1. step_ms: the longest step. kv_use: a full cache."""
    found = reported["slots"]
    if reported["kv_use"] > _KV_NOISE and reported["running"] > 0.0:
        found = min(found, reported["running"] * kv_use / reported["kv_use"])
    if reported.get("request_ms", 0.0) > 0.0:
        found = min(found, (step_ms - reported["step_ms"]) / reported["request_ms"])
    return max(1.0, found)


class EngineLoad:
    """As many replicas as it takes for their places to be occupied to a given share.

    step_ms: longest predicted step, which is a client's longest wait between two pieces of text. kv_use: share of the
    KV cache that may be in use. occupancy: share of the places that may be taken. Serve keeps the answer between its
    least and most replicas, and waits its delays. ValueError names a setting, its value and what is accepted.
    """

    def __init__(self, step_ms: float, kv_use: float = 0.85, occupancy: float = 0.7) -> None:
        if not step_ms > 0.0:
            raise ValueError(f"step_ms = {step_ms!r} is not accepted; it should be above 0")
        for name, share in (("kv_use", kv_use), ("occupancy", occupancy)):
            if not 0.0 < share <= 1.0:
                raise ValueError(f"{name} = {share!r} is not accepted; it should be above 0 and at most 1")
        self._step_ms, self._kv_use, self._occupancy = step_ms, kv_use, occupancy

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The replicas that are wanted, and no state of our own."""
        replicas = _by_replica(context.aggregated_metrics or {})
        if not replicas:
            # Nobody has reported yet; the first report is seconds away.
            return context.target_num_replicas, {}
        found = [places(one, step_ms=self._step_ms, kv_use=self._kv_use) for one in replicas]
        usual = sum(found) / len(found)
        return math.ceil(context.total_num_requests / (usual * self._occupancy)), {}


def _by_replica(metrics: Mapping[str, Mapping[Any, float]]) -> list[dict[str, float]]:
    """The reports that are whole: a replica's values arrive together, and a new one has none."""
    rows: dict[Any, dict[str, float]] = {}
    for name, values in metrics.items():
        for replica, value in values.items():
            rows.setdefault(replica, {})[name] = value
    return [row for row in rows.values() if {"running", "slots", "kv_use"} <= row.keys()]
