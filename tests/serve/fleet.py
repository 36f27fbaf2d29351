"""What the engine replicas of the running application say of themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

from ray.serve.handle import DeploymentHandle


def loads(engines: DeploymentHandle) -> list[dict[str, int]]:
    return list(engines.broadcast("load").results(timeout_s=30))


def unfinished(engines: DeploymentHandle) -> int:
    return sum(load["unfinished"] for load in loads(engines))


def seconds_until(condition: Callable[[], bool], timeout_s: float) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s"
    return time.monotonic() - start
