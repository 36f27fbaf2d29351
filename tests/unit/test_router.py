"""The Serve side of the router, with replicas that only have what Serve's records have; no cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from deployments.router import StabilityAwareRouter, router_config
from dsde.routing.stats import ReplicaStats

APP = DeploymentID("EngineReplica", "dsde")


@dataclass
class Running:
    """Stands for Serve's RunningReplica, whose actor a unit test has not. queue: requests it has."""

    name: str
    routing_stats: dict[str, Any] = field(default_factory=dict)
    queue: int = 0
    max_ongoing_requests: int = 8

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, APP)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue


def publication(number: int = 1, **other: Any) -> dict[str, Any]:
    made = {"running": 0, "waiting": 0, "slots": 32, "verify_ms": (20.0, 0.1), "draft_ms": 1.5, "prompt_ms": 0.1}
    made |= other
    return ReplicaStats(number, **made).to_dict()


def pending(name: str, method: str = "generate", avoid: tuple[str, ...] = ()) -> PendingRequest:
    sampling = SimpleNamespace(temperature=0.0, max_tokens=50, extra_args=None)
    call = SimpleNamespace(prompt={"prompt_token_ids": [1, 2, 3]}, sampling_params=sampling, avoid=avoid)
    metadata = RequestMetadata(request_id=name, internal_request_id=name, call_method=method)
    return PendingRequest(args=[call], kwargs={}, metadata=metadata)


@pytest.fixture
async def router() -> Iterator[StabilityAwareRouter]:
    made = StabilityAwareRouter(APP, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    made.initialize_state(**router_config("stability_aware").request_router_kwargs)
    return made


def names(ranks: list[list[Any]]) -> list[list[str]]:
    return [[one.name for one in rank] for rank in ranks]


async def offer(router: StabilityAwareRouter, replicas: list[Running], request: PendingRequest) -> list[list[str]]:
    """The ranks for a request, once Serve has asked all replicas for their queues."""
    router.update_replicas(replicas)
    for one in replicas:
        router.on_new_queue_len_info(one.replica_id, one.queue)
    await asyncio.sleep(0)
    return names(await router.choose_replicas(list(router.curr_replicas.values()), request))


async def test_publications_decide_and_bookings_follow(router: StabilityAwareRouter) -> None:
    one, two = Running("one", publication(verify_ms=(90.0, 0.4))), Running("two", publication())
    request = pending("1")
    assert await offer(router, [one, two], request) == [["two"], ["one"]]
    router.on_request_routed(request, one.replica_id, None)
    assert router._router.booked == 1
    router.on_request_completed(two.replica_id, "1")
    assert router._router.booked == 1
    router.on_request_completed(one.replica_id, "1")
    assert router._router.booked == 0


async def test_full_replicas_come_last_and_are_not_asked_without_pause(router: StabilityAwareRouter) -> None:
    best = Running("best", publication(running=6, waiting=2), queue=8)
    slow = Running("slow", publication(verify_ms=(90.0, 0.4)))
    assert await offer(router, [best, slow], pending("1")) == [["slow"], ["best"]]
    slow.queue, slow.routing_stats = 8, publication(2, running=8, verify_ms=(90.0, 0.4))
    request = pending("2")
    assert sorted(await offer(router, [best, slow], request)) == [["best"], ["slow"]]
    assert request.routing_context.should_backoff


async def test_a_replica_that_serve_takes_for_full_after_a_flood_is_asked(router: StabilityAwareRouter) -> None:
    free = Running("free", publication(), queue=8)
    slow = Running("slow", publication(verify_ms=(90.0, 0.4)))
    assert await offer(router, [free, slow], pending("1")) == [["free"], ["slow"]]
    # Serve asks the best one before it is chosen, and believes what it says.
    free.queue = 0
    await router._select_from_candidate_replicas([free], 0)
    assert router.replica_queue_len_cache.get(free.replica_id) == 0


async def test_a_draining_replica_is_no_candidate(router: StabilityAwareRouter) -> None:
    going, staying = Running("going", publication(draining=True)), Running("staying", publication(), queue=8)
    request = pending("1")
    assert await offer(router, [going, staying], request) == [["staying"]]
    assert await offer(router, [going], request) == []
    assert request.routing_context.should_backoff


async def test_a_dead_replica_stays_away_though_serve_still_lists_it(router: StabilityAwareRouter) -> None:
    dead, alive = Running("dead", publication()), Running("alive", publication())
    await offer(router, [dead, alive], pending("1"))
    router.on_replica_actor_died(dead.replica_id)
    assert await offer(router, [dead, alive], pending("2")) == [["alive"]]
    assert await offer(router, [alive], pending("3")) == [["alive"]]
    assert set(router._router.replicas) == {alive.replica_id}


async def test_a_request_never_goes_back_to_where_its_engine_died(router: StabilityAwareRouter) -> None:
    dead, alive = Running("dead", publication()), Running("alive", publication(), queue=8)
    assert await offer(router, [dead, alive], pending("1", avoid=("dead",))) == [["alive"]]
    request = pending("2", avoid=("dead",))
    assert await offer(router, [dead], request) == []
    assert request.routing_context.should_backoff


async def test_other_calls_and_unread_publications_go_to_two_at_random(router: StabilityAwareRouter) -> None:
    replicas = [Running(name, publication()) for name in "abc"]
    ranks = await offer(router, replicas, pending("1", "vllm_config"))
    assert [len(rank) for rank in ranks] == [2, 1]
    assert router._router.booked == 0
    strangers = [Running(name, {"number": 7, "of": "another version"}) for name in "def"]
    ranks = await offer(router, strangers, pending("2"))
    assert [len(rank) for rank in ranks] == [2, 1]


def test_serve_can_do_without_it() -> None:
    ours, serves = router_config("stability_aware"), router_config("power_of_two")
    assert "StabilityAwareRouter" in str(ours.get_request_router_class())
    assert "PowerOfTwoChoices" in str(serves.get_request_router_class())
    assert ours.request_routing_stats_period_s == serves.request_routing_stats_period_s == 1.0
