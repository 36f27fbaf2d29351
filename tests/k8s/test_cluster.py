"""The CPU overlay's serveConfigV2, as it stands, on a Ray cluster of a head without cores and two workers.

The GPU overlays' engines need GPUs; test_serve_config.py reads what they would be given.
"""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import pytest

from deployments.proto.dsde.v1 import inference_pb2 as pb
from deployments.proto.dsde.v1 import inference_pb2_grpc as pb_grpc
from tests.k8s.cluster import KEY, Cluster, Node, seconds_until
from tests.k8s.manifests import K8S, Manifest, serve_config

pytestmark = [pytest.mark.serve, pytest.mark.slow]

OVERLAY = "cpu"
READY_TIMEOUT_S = 240
ANSWER_TIMEOUT_S = 120
QUESTION = [{"role": "user", "content": "Write a long story about the sea."}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = serve_config(OVERLAY)
    for port in (config["http_options"]["port"], config["grpc_options"]["port"]):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is taken; this test deploys on it"
    started = Cluster(OVERLAY)
    try:
        for _ in range(2):
            started.add_worker()
        started.put(config)
        seconds_until(started.serves, READY_TIMEOUT_S)
        yield started
    finally:
        started.stop()


@pytest.fixture
def workers(cluster: Cluster) -> list[Node]:
    return cluster.nodes[1:]


def ask(node: Node, *, tokens: int = 16, key: str | None = KEY) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": "embedded", "messages": QUESTION, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    url = f"http://127.0.0.1:{node.http}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False)


def stream(node: Node, tokens: int) -> tuple[str, int, str]:
    """(finish reason, tokens, policy) of a streamed answer; an error of any kind is raised."""
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
    last = lines[-1]
    return reason, last["usage"]["completion_tokens"], last["metrics"]["speculative_decoding"]["dsde"]["policy"]


class Load:
    """Streams without pause, several at once, over every given node in turn; says what came of each."""

    def __init__(self, nodes: list[Node], tokens: int = 24) -> None:
        self.answers: list[tuple[str, int, str]] = []
        self.errors: list[BaseException] = []
        self._nodes, self._tokens = nodes, tokens
        self._stop = threading.Event()

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._run, args=(node,)) for node in self._nodes for _ in range(2)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, node: Node) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(stream(node, self._tokens))
            except Exception as error:
                self.errors.append(error)
                return

    def policies(self, newest: int) -> set[str]:
        return {policy for _, _, policy in self.answers[-newest:]}


@contextmanager
def no_request_fails(nodes: list[Node]) -> Iterator[Load]:
    with Load(nodes) as load:
        seconds_until(lambda: len(load.answers) >= 4 or bool(load.errors), 60)
        yield load
    assert load.errors == []
    assert {(reason, tokens) for reason, tokens, _ in load.answers} == {("length", 24)}


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
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Name three rivers.")])
    request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=12, temperature=0))
    for node in workers:
        with grpc.insecure_channel(f"127.0.0.1:{node.grpc}") as channel:
            stub = pb_grpc.InferenceStub(channel)
            metadata = (("authorization", f"Bearer {KEY}"),)
            last = list(stub.GenerateStream(request, timeout=60, metadata=metadata))[-1]
            assert last.usage.completion_tokens == 12
            with pytest.raises(grpc.RpcError) as refused:
                stub.Generate(request, timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_autoscaler_decides_by_what_the_engines_report(cluster: Cluster) -> None:
    def detail() -> dict[str, Any]:
        return dict(cluster.application()["deployments"]["EngineReplica"]["autoscaling_detail"])

    seconds_until(lambda: bool((detail()["metrics"] or {}).get("custom_metrics")), 60)
    print(json.dumps(detail(), indent=1)[:3000])
    assert detail()["errors"] == []


def test_policy_and_number_change_in_place_and_no_request_fails(cluster: Cluster, workers: list[Node]) -> None:
    before = {each["replica_id"] for each in cluster.replicas("EngineReplica")}
    config = serve_config(OVERLAY)
    with no_request_fails(workers) as load:
        usual = load.policies(newest=4)
        switched = changed(config, user_config={"policy": "static", "settings": {"length": 2}})
        cluster.put(switched)
        seconds_until(lambda: load.policies(newest=8) == {"static"} or bool(load.errors), 60)
        assert {each["replica_id"] for each in cluster.replicas("EngineReplica")} == before

        cluster.put(changed(switched, num_replicas=1, autoscaling_config=None))
        seconds_until(lambda: len(cluster.replicas("EngineReplica")) == 1 or bool(load.errors), 60)
        (left,) = {each["replica_id"] for each in cluster.replicas("EngineReplica")}
        assert left in before

        cluster.put(config)
        seconds_until(lambda: len(cluster.replicas("EngineReplica")) == 2 or bool(load.errors), READY_TIMEOUT_S)
        seconds_until(lambda: load.policies(newest=8) == usual or bool(load.errors), 60)
        assert left in {each["replica_id"] for each in cluster.replicas("EngineReplica")}


def changed(config: Manifest, **options: Any) -> Manifest:
    """The configuration with other options of the engines; None takes one away."""
    made = copy.deepcopy(config)
    (engines,) = [one for one in made["applications"][0]["deployments"] if one["name"] == "EngineReplica"]
    engines |= options
    for name in [name for name, value in engines.items() if value is None]:
        del engines[name]
    return made


def test_a_worker_that_is_drained_cuts_no_stream(cluster: Cluster, workers: list[Node]) -> None:
    cluster.add_worker()
    leaving = workers[-1]
    (leaving_id,) = [
        node for node, each in cluster.alive_nodes().items() if each["raylet"]["metricsExportPort"] == leaving.metrics
    ]
    told = leaving.environment | {
        "NODE_ID": leaving_id,
        "SERVE_PORT": str(leaving.http),
        "METRICS_PORT": str(leaving.metrics),
    }
    streams: list[tuple[str, int, str]] = []
    long = threading.Thread(target=lambda: streams.append(stream(leaving, 400)))
    with no_request_fails([workers[0]]):
        long.start()
        drained = subprocess.run([K8S / "drain"], env=told, capture_output=True, text=True, timeout=READY_TIMEOUT_S)
        assert drained.returncode == 0, drained.stderr
        # The pod goes now; its stream has ended.
        long.join(1)
        assert [(reason, tokens) for reason, tokens, _ in streams] == [("length", 400)]
        assert leaving_id not in {each["node_id"] for each in cluster.replicas("EngineReplica")}
        leaving.terminate()
        seconds_until(lambda: leaving_id not in cluster.alive_nodes(), 60)
        time.sleep(2)
