"""The router on the real application: replicas publish, requests spread, a dead engine gets nothing new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from dsde.routing.stats import ReplicaStats
from tests.serve.conftest import Served
from tests.serve.test_recovery import REPLACED_TIMEOUT_S, engine_cores

STATS_TIMEOUT_S = 30
TOLD_TIMEOUT_S = 10


@pytest.fixture
def engines(served: Served) -> Iterator[DeploymentHandle]:
    ray.init(address=served.ray_address, log_to_driver=False, logging_level="ERROR")
    yield serve.get_deployment_handle("EngineReplica", "dsde")
    ray.shutdown()


def published(engines: DeploymentHandle) -> list[ReplicaStats]:
    """What the replicas tell a router of this process; the handle's own router, since it has no public name."""
    if not engines.is_initialized:
        engines._init()
    router = engines._router._asyncio_router.request_router
    # Its router is made when the deployment's configuration has come.
    running = [] if router is None else router.curr_replicas.values()
    return [ReplicaStats.from_dict(one.routing_stats) for one in running if one.routing_stats]


def until(condition: Callable[[], bool], timeout_s: float) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.2)


def ask(web: httpx.Client, served: Served, **wanted: Any) -> int:
    body = {"model": served.model, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8}
    return web.post("/v1/chat/completions", json={**body, **wanted}).status_code


def taken(engines: DeploymentHandle) -> list[int]:
    return [load["taken"] for load in engines.broadcast("load").results(timeout_s=30)]


def test_replicas_publish_what_their_engines_have_learnt(
    web: httpx.Client, served: Served, engines: DeploymentHandle
) -> None:
    with ThreadPoolExecutor(8) as pool:
        hint = {"dsde_hint": "colours"}
        assert set(pool.map(lambda _: ask(web, served, vllm_xargs=hint, max_tokens=24), range(8))) == {200}

    def learnt() -> bool:
        stats = published(engines)
        return len(stats) == 2 and all(one.verify_ms is not None and one.running == 0 for one in stats)

    until(learnt, STATS_TIMEOUT_S)
    stats = published(engines)
    for one in stats:
        assert one.verify_ms is not None
        assert one.draft_ms is not None
        assert 0.0 < one.draft_ms < one.verify_ms[0] + one.verify_ms[1] * one.slots
        assert (one.slots, one.draining, one.priced) == (32, False, False)
    asked = [one.classes["colours/sampled"] for one in stats if "colours/sampled" in one.classes]
    assert 7.0 < sum(one.requests for one in asked) <= 8.0
    assert all(1.0 <= one.output / one.requests <= 24.0 for one in asked)
    assert all(0.0 < one.accepted <= one.drafted for one in asked)
    before = {id(one): one.number for one in stats}
    until(lambda: min(one.number for one in published(engines)) > max(before.values()), STATS_TIMEOUT_S)


def test_requests_spread_over_both_replicas(web: httpx.Client, served: Served, engines: DeploymentHandle) -> None:
    before = sorted(taken(engines))
    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(lambda _: ask(web, served, max_tokens=24), range(24))) == {200}
    gained = [now - then for then, now in zip(before, sorted(taken(engines)), strict=True)]
    assert sum(gained) == 24
    assert min(gained) >= 6


def test_a_dead_engine_gets_nothing_new_once_its_replica_has_said_so(
    web: httpx.Client, served: Served, engines: DeploymentHandle
) -> None:
    until(lambda: len(published(engines)) == 2, STATS_TIMEOUT_S)
    victim, survivor = engine_cores(served)
    victim.kill()

    def told() -> bool:
        stats = published(engines)
        return len(stats) < 2 or any(one.draining for one in stats)

    until(told, TOLD_TIMEOUT_S)
    assert [ask(web, served) for _ in range(12)] == [200] * 12
    assert survivor.is_running()
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while len(engine_cores(served)) < 2 or len(published(engines)) < 2:
        assert time.monotonic() < deadline, f"not replaced within {REPLACED_TIMEOUT_S} s"
        time.sleep(1.0)
