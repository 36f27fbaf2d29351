"""The request router of the engine deployment: Serve's callbacks around `dsde.routing`, which knows no Ray."""

from __future__ import annotations

import time
from typing import Any, Literal

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from dsde.routing.choice import StabilityAware
from dsde.routing.request import Request, described
from dsde.routing.stats import ReplicaStats

__all__ = ["StabilityAwareRouter", "router_config"]

PUBLICATION_S = 1.0
"""Period in which Serve asks the replicas for their routing stats."""


def router_config(router: Literal["stability_aware", "power_of_two"]) -> RequestRouterConfig:
    """Serve's configuration for the setting serving.router; replicas publish under either."""
    if router == "power_of_two":
        return RequestRouterConfig(request_routing_stats_period_s=PUBLICATION_S)
    return RequestRouterConfig(
        request_router_class="deployments.router:StabilityAwareRouter",
        request_router_kwargs={"stale_s": 5 * PUBLICATION_S},
        request_routing_stats_period_s=PUBLICATION_S,
    )


class StabilityAwareRouter(RequestRouter):
    """Routes generate() calls by predicted loss, and all other calls by two random choices."""

    def initialize_state(self, stale_s: float = 5 * PUBLICATION_S) -> None:
        """stale_s: age in seconds from which a publication is not relied on."""
        self._router = StabilityAware[ReplicaID](stale_s=stale_s)
        # Number of the publication that was read last: Serve repeats all of them when one is new.
        self._read: dict[ReplicaID, Any] = {}
        self._dead: set[ReplicaID] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow Serve's list of running replicas; those that stop are not on it, the dead may be for a while."""
        self._dead &= {one.replica_id for one in replicas}
        replicas = [one for one in replicas if one.replica_id not in self._dead]
        super().update_replicas(replicas)
        running = {one.replica_id for one in replicas}
        for gone in self._router.replicas - running:
            self._forget(gone)
        now = time.monotonic()
        for one in replicas:
            self._router.add(one.replica_id)
            published = one.routing_stats
            number = published.get("number") if published else None
            if number is not None and number != self._read.get(one.replica_id):
                self._read[one.replica_id] = number
                try:
                    self._router.published(one.replica_id, ReplicaStats.from_dict(published), now)
                except ValueError:
                    # Of another version of dsde, during an upgrade: it counts as stale.
                    continue

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Nothing goes to a dead replica, from now on."""
        super().on_replica_actor_died(replica_id)
        self._dead.add(replica_id)
        self._forget(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first. An attempt that finds all of them full backs off before the next."""
        if pending_request is None:
            number, request = "", None
        else:
            pending_request.routing_context.should_backoff = True
            number, request = pending_request.metadata.internal_request_id, _request_of(pending_request)
            avoid = _avoided_by(pending_request)
            candidate_replicas = [one for one in candidate_replicas if one.replica_id.unique_id not in avoid]
        by_id = {one.replica_id: one for one in candidate_replicas}
        # Full ones come last: asking one after the other whether they still are would take a round trip each. Serve's
        # count of a replica may stay at full for 10 s after a flood; where the books disagree, Serve asks.
        open_ids = [one.replica_id for one in self.select_available_replicas(candidate_replicas)]
        counted = set(open_ids)
        open_ids += [
            one.replica_id
            for one in candidate_replicas
            if one.replica_id not in counted and self._router.requests(one.replica_id) < one.max_ongoing_requests
        ]
        ranks = self._router.choose(number, request, open_ids or list(by_id), time.monotonic())
        full = [one for one in by_id if one not in set(open_ids) and not self._router.draining(one)]
        if open_ids and full:
            ranks.append(full)
        return [[by_id[one] for one in rank] for rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Book the request where it is."""
        request = _request_of(pending_request)
        if request is not None:
            self._router.routed(pending_request.metadata.internal_request_id, request, replica_id, time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Strike the request from the books."""
        self._router.completed(internal_request_id, replica_id)

    def _forget(self, replica_id: ReplicaID) -> None:
        self._router.remove(replica_id)
        self._read.pop(replica_id, None)


def _request_of(pending: PendingRequest) -> Request | None:
    """The request of a generate() call; None for other calls."""
    if pending.metadata.call_method != "generate" or not pending.args:
        return None
    call = pending.args[0]
    return described(call.prompt, call.sampling_params)


def _avoided_by(pending: PendingRequest) -> tuple[str, ...]:
    """Names of the replicas that a generate() call is to keep away from."""
    return pending.args[0].avoid if pending.metadata.call_method == "generate" and pending.args else ()
