"""Five hundred requests, cancelled at random moments, leave nothing behind: no request, no KV block, no count."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.handle import DeploymentHandle

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.serve.conftest import Served
from tests.serve.fleet import loads, published, seconds_until, unfinished

REQUESTS = 500
AT_ONCE = 48
LONGEST_S = 2.0
PROMPT = "Once upon a time, far away from here, "
# Prometheus names of what must be back at 0.
GAUGES = (
    "ray_dsde_requests_running",
    "ray_dsde_requests_waiting",
    "ray_vllm_num_requests_running",
    "ray_vllm_num_requests_waiting",
    "ray_vllm_kv_cache_usage_perc",
    "ray_serve_deployment_queued_queries",
    "ray_serve_num_ongoing_requests_at_replicas",
    "ray_serve_num_ongoing_http_requests",
    "ray_serve_num_ongoing_grpc_requests",
)


def gauges(served: Served) -> dict[str, list[float]]:
    text = httpx.get(served.metrics, trust_env=False, timeout=30).text
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    return {name: [sample.value for sample in found.get(name, [])] for name in GAUGES}


def disconnect(served: Served, after_s: float, stream: bool) -> None:
    body = {"model": served.model, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    timeout = httpx.Timeout(30, read=after_s)
    with (
        suppress(httpx.ReadTimeout),
        served.web(timeout) as web,
        web.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        next(answer.iter_lines(), None)


def deadline(served: Served, after_s: float, stream: bool) -> None:
    with served.channel() as channel:
        call = start(channel, stream, after_s)
        assert call.exception(30).code() is grpc.StatusCode.DEADLINE_EXCEEDED


def abort(served: Served, after_s: float, stream: bool) -> None:
    with served.channel() as channel:
        call = start(channel, stream, 60)
        try:
            call.result(after_s)
        except grpc.FutureTimeoutError:
            call.cancel()


def start(channel: grpc.Channel, stream: bool, timeout_s: float) -> grpc.Future:
    request = pb.GenerateRequest(prompt=PROMPT, sampling=pb.SamplingParams(max_tokens=1500, ignore_eos=True))
    inference = pb_grpc.InferenceStub(channel)
    if stream:
        call: grpc.Future = inference.GenerateStream(request, timeout=timeout_s)
        return call
    return inference.Generate.future(request, timeout=timeout_s)


WAYS: tuple[Callable[[Served, float, bool], None], ...] = (disconnect, deadline, abort)


def test_nothing_is_left_of_cancelled_requests(served: Served, engines: DeploymentHandle) -> None:
    draw = random.Random(5)
    plan = [(WAYS[number % 3], draw.uniform(0.01, LONGEST_S), draw.random() < 0.5) for number in range(REQUESTS)]
    lowest = 0.0
    seen: set[str] = set()
    before = sum(load["taken"] for load in loads(engines))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(way, served, after_s, stream) for way, after_s, stream in plan]
        for one in running:
            one.result(120)
            if running.index(one) % 50 == 0:
                sampled = gauges(served)
                seen |= {name for name, values in sampled.items() if values}
                lowest = min([lowest, *(value for values in sampled.values() for value in values)])
    assert sum(load["taken"] for load in loads(engines)) > before + REQUESTS / 2
    seconds_until(lambda: unfinished(engines) == 0, 30)

    def at_rest() -> bool:
        # Ray stops telling of a gauge that nobody sets, and at rest nobody does.
        return all(set(values) <= {0.0} for values in gauges(served).values())

    def published_at_rest() -> bool:
        stats = published(engines)
        return len(stats) == 2 and all((one.running, one.waiting, one.kv_use) == (0, 0, 0.0) for one in stats)

    seconds_until(published_at_rest, 30)
    try:
        seconds_until(at_rest, 60)
    except AssertionError:
        raise AssertionError(str(gauges(served))) from None
    assert lowest == 0.0
    assert seen == set(GAUGES)
