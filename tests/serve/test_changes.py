"""The application changes under traffic: nobody's request fails, and long streams come to their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
from ray.serve.handle import DeploymentHandle

from deployments.serve import _serve_client, switch_policy
from tests.serve.conftest import Served
from tests.serve.fleet import seconds_until, unfinished
from tests.serve.streams import TIMEOUT_S, TOKENS, WAYS, ask

PERIOD_S = 0.1
CALM_S = 2.0
LONG = 4 * TOKENS


@contextmanager
def traffic(served: Served) -> Iterator[list[int]]:
    """Ten short requests a second while it is open; the status of each, complete afterwards."""
    codes: list[int] = []
    over = threading.Event()

    def send_one() -> None:
        body = {"model": served.model, "prompt": "One, two,", "max_tokens": 1}
        codes.append(web.post("/v1/completions", json=body).status_code)

    def send() -> None:
        due = time.monotonic()
        while not over.is_set():
            asking.append(pool.submit(send_one))
            due += PERIOD_S
            time.sleep(max(0.0, due - time.monotonic()))

    asking: list[Any] = []
    limits = httpx.Limits(max_connections=None)
    base, headers = served.url.removesuffix("/v1"), served.headers
    with (
        httpx.Client(base_url=base, timeout=TIMEOUT_S, trust_env=False, limits=limits, headers=headers) as web,
        ThreadPoolExecutor(200) as pool,
    ):
        sender = threading.Thread(target=send)
        sender.start()
        try:
            time.sleep(CALM_S)
            yield codes
            time.sleep(CALM_S)
        finally:
            over.set()
            sender.join()
        for one in asking:
            one.result(TIMEOUT_S)


def deploy(served: Served, deployment: str, **options: Any) -> None:
    """Lay options over a deployment's own, as `serve deploy` does."""
    client = _serve_client(served.dashboard)
    running = client.get_serve_details()
    app = running["applications"]["dsde"]["deployed_app_config"]
    others = [one for one in app.get("deployments", []) if one["name"] != deployment]
    app["deployments"] = [*others, {"name": deployment, **options}]
    instance = {key: running[key] for key in ("proxy_location", "http_options", "grpc_options")}
    client.deploy_applications({**instance, "applications": [app]})


def states(served: Served, deployment: str) -> list[str]:
    app = _serve_client(served.dashboard).get_serve_details()["applications"]["dsde"]
    return sorted(replica["state"] for replica in app["deployments"][deployment]["replicas"])


def test_fewer_and_more_replicas_lose_nothing(served: Served, engines: DeploymentHandle) -> None:
    streams = [ask("1 2 3 4 5 6 7 8 9 10", temperature=0, max_tokens=LONG) for _ in range(4)]
    with ThreadPoolExecutor(len(streams)) as pool:
        running = [pool.submit(WAYS[number % 2], served, one) for number, one in enumerate(streams)]
        seconds_until(lambda: all(one.ids for one in streams), TIMEOUT_S)
        with traffic(served) as codes:
            deploy(served, "EngineReplica", num_replicas=1)
            seconds_until(lambda: states(served, "EngineReplica") == ["RUNNING"], TIMEOUT_S)
            deploy(served, "EngineReplica", num_replicas=2)
            seconds_until(lambda: states(served, "EngineReplica") == ["RUNNING"] * 2, TIMEOUT_S)
        for one in running:
            one.result(TIMEOUT_S)
    assert len(codes) > 10 * 2 * CALM_S
    assert set(codes) == {200}
    for stream in streams:
        assert (stream.error, len(stream.ids)) == (None, LONG)
        assert stream.usage is not None
        assert stream.usage[1] == LONG
    # The one that went was given a few seconds, which none of them had enough of.
    assert any(one.resumed for one in streams)
    seconds_until(lambda: unfinished(engines) == 0, 30)


def test_another_policy_and_another_ingress_lose_nothing(served: Served, engines: DeploymentHandle) -> None:
    streams = [ask("1 2 3 4 5 6 7 8 9 10", temperature=0, max_tokens=LONG) for _ in range(2)]
    with ThreadPoolExecutor(len(streams)) as pool:
        running = [pool.submit(WAYS[number % 2], served, one) for number, one in enumerate(streams)]
        seconds_until(lambda: all(one.ids for one in streams), TIMEOUT_S)
        with traffic(served) as codes:
            switch_policy("static", {"length": 2}, served.dashboard)
            # One more, so that one goes: what it streams it may finish.
            deploy(served, "OpenAIIngress", num_replicas=2)
            seconds_until(lambda: states(served, "OpenAIIngress") == ["RUNNING"] * 2, TIMEOUT_S)
            deploy(served, "OpenAIIngress", num_replicas=1)
            seconds_until(lambda: states(served, "OpenAIIngress").count("RUNNING") == 1, TIMEOUT_S)
            switch_policy(served.policy, {}, served.dashboard)
        for one in running:
            one.result(TIMEOUT_S)
    assert set(codes) == {200}
    for stream in streams:
        assert (stream.error, len(stream.ids), stream.resumed) == (None, LONG, False)
    seconds_until(lambda: unfinished(engines) == 0, 30)
