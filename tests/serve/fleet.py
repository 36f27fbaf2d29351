"""What the running application's replicas and processes are doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from dsde.routing.stats import ReplicaStats

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from tests.serve.conftest import Served

_POLL_S = 0.02


def loads(engines: DeploymentHandle) -> list[dict[str, int]]:
    return list(engines.broadcast("load").results(timeout_s=30))


def unfinished(engines: DeploymentHandle) -> int:
    return sum(load["unfinished"] for load in loads(engines))


def taken(engines: DeploymentHandle) -> list[int]:
    return sorted(load["taken"] for load in loads(engines))


def published(engines: DeploymentHandle) -> list[ReplicaStats]:
    """What the replicas tell a router of this process; the handle's own router, since it has no public name."""
    # The router is made by the first call, in the loop in which it lives.
    engines.load.remote().result(timeout_s=30)
    running = engines._router._asyncio_router.request_router.curr_replicas.values()
    return [ReplicaStats.from_dict(one.routing_stats) for one in running if one.routing_stats]


def processes(served: Served, name: str) -> list[psutil.Process]:
    """The application's processes whose command line has `name`."""
    found = []
    for one in psutil.Process(served.pid).children(recursive=True):
        # A process may end, or wait as a zombie, while it is asked.
        with suppress(psutil.Error):
            if name in "".join(one.cmdline()):
                found.append(one)
    return found


def seconds_until(condition: Callable[[], bool], timeout_s: float) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s"
        time.sleep(_POLL_S)
    return time.monotonic() - start
