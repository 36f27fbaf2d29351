"""What one routing decision costs: choose, book and strike, at 1 to 256 replicas.

Usage: OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/routing_decision.py
"""

from __future__ import annotations

import random
import time

import numpy as np

from dsde.routing.choice import StabilityAware
from dsde.routing.request import describe
from dsde.routing.stats import ClassStats, ReplicaStats

DECISIONS = 2000
PROMPT = 500
CLASSES = {f"class {number}": ClassStats(40, 8000, 4000, 12_000, 6000) for number in range(32)}


def measure(replicas: int) -> dict[str, float]:
    """Median microseconds of each part, over DECISIONS requests on replicas with 16 requests each."""
    rng = random.Random(0)
    router = StabilityAware[int](seed=0)
    prompts = [[rng.randrange(50_000) for _ in range(PROMPT)] for _ in range(64)]
    requests = [describe(prompt, temperature=0.0, max_tokens=256) for prompt in prompts]
    for replica in range(replicas):
        router.add(replica)
        router.published(replica, ReplicaStats(1, 0, 0, 32, 0.1, (20.0, 0.1), 1.5, classes=CLASSES), 0.0)
    for number in range(16 * replicas):
        router.routed(f"there {number}", rng.choice(requests), number % replicas, 0.0)
    candidates = list(range(replicas))
    times: dict[str, list[int]] = {"describe": [], "choose": [], "routed": [], "completed": [], "published": []}
    for number in range(DECISIONS):
        name = str(number)
        stamps = [time.perf_counter_ns()]
        request = describe(prompts[number % 64], temperature=0.0, max_tokens=256)
        stamps.append(time.perf_counter_ns())
        chosen = router.choose(name, request, candidates, 1.0)[0][0]
        stamps.append(time.perf_counter_ns())
        router.routed(name, request, chosen, 1.0)
        stamps.append(time.perf_counter_ns())
        router.completed(name, chosen)
        stamps.append(time.perf_counter_ns())
        stats = ReplicaStats(number + 2, 16, 0, 32, 0.1, (20.0, 0.1), 1.5, classes=CLASSES)
        router.published(chosen, stats, 1.0)
        stamps.append(time.perf_counter_ns())
        for part, start, end in zip(times, stamps, stamps[1:], strict=False):
            times[part].append(end - start)
    return {part: float(np.median(taken)) / 1e3 for part, taken in times.items()}


def main() -> None:
    print(f"median microseconds; prompts of {PROMPT} tokens")
    for replicas in (1, 8, 64, 256):
        parts = measure(replicas)
        print(f"{replicas:4} replicas: " + ", ".join(f"{part} {us:.1f}" for part, us in parts.items()))


if __name__ == "__main__":
    main()
