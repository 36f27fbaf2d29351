"""The stability-aware router against Serve's own on a real two-replica application, in interleaved rounds.

The application stays up. Each turn configures the engine deployment's router anew and takes a fresh handle, which then
routes by it. Both get the same requests at the same times in a round; they go to the engines past HTTP.

Usage: .venv/bin/python tests/benchmarks/router_on_app.py [--rounds 3] [--requests 24] [--rate 0.6]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray
from ray import serve
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.router import router_config
from dsde.engine.remote import GenerateCall

KINDS = (("short", 0.5, 24, 8), ("long", 0.3, 24, 64), ("prompt", 0.2, 300, 16))
"""Name, share, tokens of the prompt and of the answer."""
ANY_PORT = ["--port", "0", "--grpc-port", "0", "--dashboard-port", "0"]
ROUTERS = ("stability_aware", "power_of_two")
SETTLE_S = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=0.6, help="requests per second")
    given = parser.parse_args()
    # The application is to end with this process, however that ends.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    command = [sys.executable, "-m", "dsde.cli", "serve", "--pair", "embedded", "--policy", "goodput", "--open"]
    process = subprocess.Popen([*command, *ANY_PORT], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        text = ""
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            text += line
            if "Ctrl-C stops it." in line:
                break
        dashboard, address = (_field(text, name) for name in ("Ray dashboard", "Ray address"))
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        asyncio.run(_rounds(given, ServeSubmissionClient(dashboard)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def _rounds(given: argparse.Namespace, client: ServeSubmissionClient) -> None:
    await _turn(client, ROUTERS[0], given, seed=-1)
    found: dict[str, list[tuple[float, float, float, float]]] = {router: [] for router in ROUTERS}
    for number in range(given.rounds):
        for router in ROUTERS if number % 2 == 0 else ROUTERS[::-1]:
            figures = await _turn(client, router, given, seed=number)
            found[router].append(figures)
            print(f"round {number + 1}, {router:16} " + _text(figures), flush=True)
    for router, rows in found.items():
        mean = tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))
        print(f"mean,    {router:16} " + _text(mean))  # type: ignore[arg-type]
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(*(found[router] for router in ROUTERS), strict=True)]
    low, high = min(ratios), max(ratios)
    print(f"mean latency against Serve's own: {statistics.median(ratios):.3f} in the median ({low:.3f} to {high:.3f})")


async def _turn(
    client: ServeSubmissionClient, router: str, given: argparse.Namespace, seed: int
) -> tuple[float, float, float, float]:
    """(mean, p50, p99 latency in s, tokens/s) of one round under `router`."""
    _configure(client, router)
    handle = serve.get_deployment_handle("EngineReplica", "dsde").options(stream=True)
    # A new handle learns of the replicas, and of their publications, by its first calls.
    await asyncio.gather(*(_ask(handle, f"warm {router} {seed} {n}", [n + 5] * 8, 2) for n in range(4)))
    await asyncio.sleep(SETTLE_S)
    rng = random.Random(seed)
    kinds = rng.choices(KINDS, [share for _, share, _, _ in KINDS], k=given.requests)
    start, at = time.monotonic(), 0.0
    tasks = []
    for number, (_, _, prompt, answer) in enumerate(kinds):
        at += rng.expovariate(given.rate)
        ids = [rng.randrange(100, 20_000) for _ in range(prompt)]
        await asyncio.sleep(max(0.0, start + at - time.monotonic()))
        tasks.append(asyncio.create_task(_ask(handle, f"{router} {seed} {number}", ids, answer)))
    latencies = sorted(await asyncio.gather(*tasks))
    tokens = sum(answer for _, _, _, answer in kinds)
    count = len(latencies)
    return (
        sum(latencies) / count,
        latencies[count // 2],
        latencies[min(count - 1, int(0.99 * count))],
        tokens / (time.monotonic() - start),
    )


async def _ask(handle: Any, name: str, ids: list[int], answer: int) -> float:
    start = time.monotonic()
    sampling = SamplingParams(
        temperature=0.0, max_tokens=answer, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    call = GenerateCall({"type": "token", "prompt_token_ids": ids}, sampling, name)
    async for _ in handle.generate.remote(call):
        pass
    return time.monotonic() - start


def _configure(client: ServeSubmissionClient, router: str) -> None:
    running = client.get_serve_details()
    (app,) = (one["deployed_app_config"] for one in running["applications"].values())
    config = router_config(router)  # type: ignore[arg-type]
    wanted = {
        "request_router_class": config.request_router_class,
        "request_router_kwargs": config.request_router_kwargs,
        "request_routing_stats_period_s": config.request_routing_stats_period_s,
    }
    app["deployments"] = [{"name": "EngineReplica", "request_router_config": wanted}]
    instance = {key: running[key] for key in ("proxy_location", "http_options", "grpc_options")}
    client.deploy_applications({**instance, "applications": [app]})
    deadline = time.monotonic() + 60
    while client.get_serve_details()["applications"][app["name"]]["status"] != "RUNNING":
        assert time.monotonic() < deadline, "the application does not come back from a change of its router"
        time.sleep(0.5)


def _text(figures: tuple[float, float, float, float]) -> str:
    mean, p50, p99, tokens = figures
    return f"mean {mean:6.2f} s, p50 {p50:6.2f} s, p99 {p99:6.2f} s, {tokens:5.1f} tokens/s"


def _field(banner: str, name: str) -> str:
    found = re.search(rf"{name}\s+(\S+)", banner)
    assert found is not None, banner
    return found.group(1)


if __name__ == "__main__":
    main()
