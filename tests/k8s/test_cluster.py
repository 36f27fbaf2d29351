"""Each overlay's serveConfigV2, as it stands, on a Ray cluster of a head without cores and its workers.

The CPU overlay serves. The GPU overlays' engines need GPUs and their models: their application is built and deployed by
Serve, and its replicas wait for resources, so that nothing of it answers here.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.k8s.cluster import KEY, Cluster, Node, seconds_until
from tests.k8s.manifests import K8S, Manifest, options, serve_config

pytestmark = [pytest.mark.serve, pytest.mark.slow]

OVERLAY = "cpu"
READY_TIMEOUT_S = 240
ANSWER_TIMEOUT_S = 120
QUESTION = [{"role": "user", "content": "Write a long story about the sea."}]
CHAT = pb.Chat(messages=[pb.ChatMessage(**message) for message in QUESTION])
BEARER = (("authorization", f"Bearer {KEY}"),)


class Answer(NamedTuple):
    """What ended a stream, its tokens, and the policy that its engine had."""

    reason: str
    tokens: int
    policy: str


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    config = serve_config(OVERLAY)
    for port in (config["http_options"]["port"], config["grpc_options"]["port"]):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is taken; this test deploys on it"
    started = Cluster(OVERLAY)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def cluster(head: Cluster) -> Cluster:
    for _ in range(2):
        head.add_worker()
    head.put(serve_config(OVERLAY))
    seconds_until(head.serves, READY_TIMEOUT_S)
    return head


@pytest.fixture
def workers(cluster: Cluster) -> list[Node]:
    """Those that serve from the start."""
    return cluster.nodes[1:3]


@pytest.fixture(scope="module")
def spare(cluster: Cluster) -> Node:
    """A third one, as the autoscaler adds a pod for an engine that finds no place."""
    return cluster.add_worker()


def ask(node: Node, *, tokens: int = 16, key: str | None = KEY) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": "embedded", "messages": QUESTION, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    url = f"http://127.0.0.1:{node.http}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False)


def stream(node: Node, tokens: int) -> Answer:
    """A streamed answer over HTTP; an error of any kind is raised."""
    body: dict[str, Any] = {"model": "embedded", "messages": QUESTION, "max_tokens": tokens, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    url = f"http://127.0.0.1:{node.http}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {KEY}"}
    reason, lines = "", []
    with httpx.stream("POST", url, json=body, headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                lines.append(json.loads(line.removeprefix("data: ")))
                for choice in lines[-1]["choices"]:
                    reason = choice["finish_reason"] or reason
    usage, figures = lines[-1]["usage"], lines[-1]["metrics"]["speculative_decoding"]["dsde"]
    return Answer(reason, usage["completion_tokens"], figures["policy"])


def stream_grpc(node: Node, tokens: int) -> Answer:
    """The same over gRPC."""
    request = pb.GenerateRequest(chat=CHAT, sampling=pb.SamplingParams(max_tokens=tokens, ignore_eos=True))
    with grpc.insecure_channel(f"127.0.0.1:{node.grpc}") as channel:
        messages = pb_grpc.InferenceStub(channel).GenerateStream(request, timeout=ANSWER_TIMEOUT_S, metadata=BEARER)
        last = list(messages)[-1]
    reason = pb.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower()
    return Answer(reason, last.usage.completion_tokens, last.speculation.dsde.policy)


class Load:
    """Streams without pause over HTTP to one node and over gRPC to another; keeps what came of them."""

    def __init__(self, http: Node, rpc: Node, tokens: int) -> None:
        self.answers: list[Answer] = []
        self.errors: list[BaseException] = []
        self._tokens = tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=each) for each in ((stream, http), (stream_grpc, rpc))]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, kind: Callable[[Node, int], Answer], node: Node) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(kind(node, self._tokens))
            except Exception as error:
                self.errors.append(error)
                return

    def policies(self, newest: int) -> set[str]:
        return {each.policy for each in self.answers[-newest:]}

    def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition, or for the first failure."""
        seconds_until(lambda: condition() or bool(self.errors), timeout_s)
        assert self.errors == []


@contextmanager
def no_request_fails(nodes: list[Node]) -> Iterator[Load]:
    tokens = 24
    with Load(nodes[0], nodes[-1], tokens) as load:
        load.until(lambda: len(load.answers) >= 4, 60)
        yield load
    assert load.errors == []
    assert {(each.reason, each.tokens) for each in load.answers} == {("length", tokens)}


def test_serve_builds_and_places_the_application_of_the_gpu_overlay(head: Cluster) -> None:
    config = serve_config("gpu")
    assert config == serve_config("gpu-redis")
    sent = head.put(config)
    names = ("EngineReplica", "OpenAIIngress")
    seconds_until(lambda: all(len(head.replicas(name)) == 2 for name in names), READY_TIMEOUT_S)
    app = head.application()
    (wanted,) = sent["applications"]
    assert {name: app["deployed_app_config"][name] for name in wanted} == wanted
    asked = app["deployments"]["EngineReplica"]["deployment_config"]["ray_actor_options"]
    assert (asked["num_cpus"], asked["num_gpus"]) == (4, 1)
    # Without a node that has GPUs, or cores, they wait.
    assert app["status"] == "DEPLOYING"
    assert {each["state"] for name in names for each in head.replicas(name)} == {"STARTING"}


def test_the_engines_lie_on_one_worker_each_and_nothing_on_the_head(cluster: Cluster) -> None:
    for deployment in ("EngineReplica", "OpenAIIngress"):
        places = {each["node_id"] for each in cluster.replicas(deployment)}
        assert len(places) == 2
        assert all("CPU" in cluster.resources(node) for node in places)
    assert cluster.anonymous_status() == 401


def test_every_worker_answers_http_for_those_with_the_key(workers: list[Node]) -> None:
    for node in workers:
        answer = ask(node)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 16
        assert ask(node, key=None).status_code == 401
        probe = httpx.get(f"http://127.0.0.1:{node.http}/-/healthz", trust_env=False)
        assert probe.status_code == 200


def test_every_worker_answers_grpc_for_those_with_the_key(workers: list[Node]) -> None:
    for node in workers:
        assert stream_grpc(node, 12)[:2] == ("length", 12)
        with grpc.insecure_channel(f"127.0.0.1:{node.grpc}") as channel:
            with pytest.raises(grpc.RpcError) as refused:
                pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(chat=CHAT), timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.usefixtures("spare")
def test_policy_and_number_change_in_place_and_no_request_fails(cluster: Cluster, workers: list[Node]) -> None:
    before, config = cluster.engines(), serve_config(OVERLAY)
    scaling = options(OVERLAY, "EngineReplica")["autoscaling_config"]
    with no_request_fails(workers) as load:
        usual = load.policies(newest=4)
        switched = changed(config, user_config={"policy": "static", "settings": {"length": 2}})
        cluster.put(switched)
        load.until(lambda: load.policies(newest=8) == {"static"}, 60)
        assert cluster.engines() == before

        cluster.put(changed(switched, autoscaling_config=scaling | {"min_replicas": 3}))
        load.until(lambda: len(cluster.engines()) == 3, READY_TIMEOUT_S)
        grown = cluster.engines()
        assert before < grown

        # From what the engines report the policy says that one is enough; without reports it changes nothing.
        cluster.put(changed(switched, autoscaling_config=scaling | {"downscale_delay_s": 1}))
        load.until(lambda: len(cluster.replicas("EngineReplica")) == 2, 120)
        left = cluster.engines()
        assert left < grown

        cluster.put(config)
        load.until(lambda: load.policies(newest=8) == usual, 60)
        assert cluster.engines() == left


def changed(config: Manifest, **other: Any) -> Manifest:
    """The configuration with other options of the engines."""
    made = copy.deepcopy(config)
    (engines,) = [one for one in made["applications"][0]["deployments"] if one["name"] == "EngineReplica"]
    engines |= other
    return made


def test_a_worker_that_is_drained_cuts_no_stream(cluster: Cluster, workers: list[Node], spare: Node) -> None:
    at = cluster.places([*workers, spare])
    busy = {each["node_id"] for name in ("EngineReplica", "OpenAIIngress") for each in cluster.replicas(name)}
    engines = {each["node_id"] for each in cluster.replicas("EngineReplica")}
    leaving_id = next(node for node in at if node in engines)
    leaving, staying = at[leaving_id], next(node for place, node in at.items() if place in busy - {leaving_id})
    told = leaving.environment | {
        "NODE_ID": leaving_id,
        "DASHBOARD_PORT": str(cluster.dashboard),
        "METRICS_PORT": str(leaving.metrics),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    streams: list[Answer] = []
    long = threading.Thread(target=lambda: streams.append(stream(leaving, 400)))
    with no_request_fails([staying]) as load:
        long.start()
        drained = subprocess.run([K8S / "drain.py"], env=told, capture_output=True, text=True, timeout=READY_TIMEOUT_S)
        assert (drained.returncode, drained.stderr) == (0, "")
        # The pod goes now; its stream has ended, and its engine has a successor.
        long.join(1)
        assert [each[:2] for each in streams] == [("length", 400)]
        places = {each["node_id"] for each in cluster.replicas("EngineReplica")}
        assert len(places) == 2
        assert leaving_id not in places
        leaving.terminate()
        seconds_until(lambda: leaving_id not in cluster.alive_nodes(), 60)
        served = len(load.answers)
        load.until(lambda: len(load.answers) >= served + 4, 60)
