from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.autoscaling import EngineLoad, places, signals
from dsde.routing.stats import ReplicaStats

LIMITS = {"step_ms": 60.0, "kv_use": 0.8}


def reported(**other: float) -> dict[str, float]:
    return {"running": 16.0, "slots": 32.0, "kv_use": 0.0, **other}


def context(requests: float, *replicas: dict[str, float], target: int = 2) -> Any:
    """What Serve hands to a policy: a metric's values by replica."""
    names = {name for one in replicas for name in one}
    metrics = {name: {at: one[name] for at, one in enumerate(replicas) if name in one} for name in names}
    return SimpleNamespace(total_num_requests=requests, aggregated_metrics=metrics, target_num_replicas=target)


def test_a_replica_reports_its_places_and_what_a_step_will_take() -> None:
    stats = ReplicaStats(1, 3, 2, 32, kv_use=0.25, verify_ms=(20.0, 0.5), draft_ms=2.0, length=4.0)
    # A step of n requests at length 4: 20 + 4 drafts of 2 ms, and for each request 5 tokens of 0.5 ms.
    assert signals(stats) == {"running": 3, "slots": 32, "kv_use": 0.25, "step_ms": 28.0, "request_ms": 2.5}


def test_costs_that_are_not_measured_are_not_reported() -> None:
    assert signals(ReplicaStats(1, 0, 0, 32)) == {"running": 0, "slots": 32, "kv_use": 0}


def test_the_narrowest_of_three_limits_counts() -> None:
    assert places(reported(), **LIMITS) == 32
    # 16 requests fill 64 % of the cache, so 20 fill 80 %.
    assert places(reported(kv_use=0.64), **LIMITS) == pytest.approx(20)
    # 28 + 2.5 n = 60
    assert places(reported(kv_use=0.64, step_ms=28.0, request_ms=2.5), **LIMITS) == pytest.approx(12.8)


def test_a_replica_whose_every_step_is_too_long_still_has_a_place() -> None:
    assert places(reported(step_ms=90.0, request_ms=2.5), **LIMITS) == 1


def test_an_idle_cache_foretells_nothing() -> None:
    assert places(reported(running=1.0, kv_use=0.04), **LIMITS) == 32
    assert places(reported(running=0.0, kv_use=0.5), **LIMITS) == 32


@pytest.mark.parametrize(("requests", "wanted"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3), (96, 6)])
def test_replicas_follow_the_requests(requests: int, wanted: int) -> None:
    policy = EngineLoad(step_ms=60.0, occupancy=0.5)
    assert policy(context(requests, reported(), reported())) == (wanted, {})


def test_slower_steps_want_more_replicas() -> None:
    policy = EngineLoad(step_ms=60.0, occupancy=1.0)
    slow = reported(step_ms=28.0, request_ms=4.0)
    assert policy(context(32, reported(), reported()))[0] == 1
    assert policy(context(32, slow, slow))[0] == 4
    # A mean over replicas: 8 places and 32.
    assert policy(context(32, slow, reported()))[0] == 2


def test_a_replica_that_has_not_reported_is_taken_to_be_as_the_others() -> None:
    policy = EngineLoad(step_ms=60.0, occupancy=1.0)
    assert policy(context(64, reported(), {"running": 1.0}))[0] == 2


def test_without_a_report_nothing_changes() -> None:
    assert EngineLoad(step_ms=60.0)(context(99, target=3)) == (3, {})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"step_ms": 0}, "step_ms = 0"),
        ({"step_ms": 1, "kv_use": 1.2}, "kv_use = 1.2"),
        ({"step_ms": 1, "occupancy": 0}, "occupancy = 0"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EngineLoad(**settings)
