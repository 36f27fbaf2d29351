"""A Ray cluster of several nodes on this machine, started as KubeRay starts its pods, and the operator's REST calls."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from dsde.access.keys import new_key, write_keys
from tests.k8s.manifests import K8S, Manifest, environment, groups

__all__ = ["KEY", "Cluster", "Node", "seconds_until"]

_KEY, KEY = new_key("tests", datetime.now(UTC))
# Where the pods have their keys; here a file of the tests.
_KEYS_FILE = "/keys/keys.json"
_TOKEN = "a-token-of-the-tests-that-nobody-else-has"
# Paths in the pods; here the home and the prepared models of whoever runs the tests.
_OF_THE_POD = {"HOME", "DSDE_MODELS_DIR"}
_START_TIMEOUT_S = 90


def seconds_until(condition: Callable[[], bool], timeout_s: float) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.5)
    return time.monotonic() - start


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


class Node:
    """A `ray start` of its own, as in a pod. http, grpc: its proxy's ports. metrics: Ray's port for Prometheus."""

    def __init__(self, arguments: list[str], held: dict[str, str], *, cpus: int, memory: str, log: Path) -> None:
        self.http, self.grpc, self.metrics, *agents = free_ports(6)
        # Pods have an address each; here they share one, so that each worker's proxy needs ports of its own.
        held = held | {
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.http),
            "RAY_SERVE_WORKER_PROXY_GRPC_PORT": str(self.grpc),
        }
        flags = {
            "--num-cpus": cpus,
            "--object-store-memory": memory,
            "--node-ip-address": "127.0.0.1",
            "--metrics-export-port": self.metrics,
            "--dashboard-agent-listen-port": agents[0],
            "--dashboard-agent-grpc-port": agents[1],
            "--runtime-env-agent-port": agents[2],
        }
        words = [f"{flag}={value}" for flag, value in flags.items()]
        self._process = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", "--block", *arguments, *words],
            env=held,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.environment = held

    def processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def terminate(self) -> None:
        """As Kubernetes ends a container."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)


class Cluster:
    """The Ray cluster of an overlay: a head without cores, and workers that join it. dashboard: its port."""

    def __init__(self, overlay: str) -> None:
        self._groups = groups(overlay)
        # Short: it holds sockets, whose paths have a limit.
        self.folder = Path(tempfile.mkdtemp(prefix="dsde-", dir="/tmp"))
        gcs, self.dashboard, client = free_ports(3)
        self._address = f"127.0.0.1:{gcs}"
        arguments = ["--head", f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}"]
        arguments += [f"--ray-client-server-port={client}", f"--temp-dir={self.folder}"]
        self.nodes = [self._start("head", arguments)]
        self._rest = httpx.Client(
            base_url=f"http://127.0.0.1:{self.dashboard}",
            headers={"x-ray-authorization": f"Bearer {_TOKEN}"},
            timeout=30,
            trust_env=False,
        )
        try:
            seconds_until(self._answers, _START_TIMEOUT_S)
        except AssertionError:
            self.stop()
            raise

    def add_worker(self) -> Node:
        node = self._start("worker", [f"--address={self._address}"])
        self.nodes.append(node)
        # One after the other: Ray nodes that share a machine, and start together, wait for each other.
        seconds_until(lambda: len(self.alive_nodes()) == len(self.nodes), _START_TIMEOUT_S)
        return node

    def _start(self, kind: str, arguments: list[str]) -> Node:
        group = self._groups[kind]
        container = group["template"]["spec"]["containers"][0]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "OMP_", "LD_PRELOAD", "RAY_"))}
        held = inherited | {k: v for k, v in environment(container).items() if k not in _OF_THE_POD}
        held |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _TOKEN,
            "RAY_ADDRESS": self._address,
            "PYTHONPATH": str(K8S.parent),
        }
        # KubeRay takes a worker's cores from its limits.
        cpus = group["rayStartParams"].get("num-cpus", container["resources"]["limits"]["cpu"])
        memory = group["rayStartParams"]["object-store-memory"]
        log = self.folder / f"{kind}-{time.monotonic_ns()}.log"
        return Node(arguments, held, cpus=int(cpus), memory=memory, log=log)

    def _answers(self) -> bool:
        try:
            return self._rest.get("/api/serve/applications/").status_code == 200
        except httpx.HTTPError:
            return False

    def put(self, config: Manifest) -> Manifest:
        """What the operator does with serveConfigV2. Returns what was put: as it stands, but for where the keys are."""
        own = self.folder / "keys.json"
        write_keys(own, [_KEY])
        sent: Manifest = json.loads(json.dumps(config).replace(_KEYS_FILE, str(own)))
        answer = self._rest.put("/api/serve/applications/", json=sent)
        assert answer.status_code == 200, answer.text
        return sent

    def anonymous_status(self) -> int:
        """The answer to somebody without the cluster's token."""
        url = f"http://127.0.0.1:{self.dashboard}/api/serve/applications/"
        return httpx.get(url, trust_env=False, timeout=30).status_code

    def application(self) -> dict[str, Any]:
        details = self._rest.get("/api/serve/applications/").json()
        return dict(details["applications"].get("dsde", {}))

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """Those that start, serve or stop; Serve lists none while it builds a changed application."""
        return list(self.application().get("deployments", {}).get(deployment, {}).get("replicas", []))

    def engines(self) -> set[str]:
        """The engine replicas that serve."""
        return {each["replica_id"] for each in self.replicas("EngineReplica") if each["state"] == "RUNNING"}

    def serves(self) -> bool:
        """Whether the application is up; AssertionError with Serve's reason when it never will be."""
        app = self.application()
        assert app.get("status") not in ("DEPLOY_FAILED", "UNHEALTHY"), app
        return app.get("status") == "RUNNING"

    def resources(self, node: str) -> dict[str, float]:
        """What Ray can hand out on a node."""
        return dict(self.alive_nodes()[node]["raylet"]["resourcesTotal"])

    def alive_nodes(self) -> dict[str, dict[str, Any]]:
        nodes = self._rest.get("/nodes?view=summary").json()["data"]["summary"]
        return {each["raylet"]["nodeId"]: each for each in nodes if each["raylet"]["state"] == "ALIVE"}

    def places(self, nodes: list[Node]) -> dict[str, Node]:
        """Each node by Ray's id of it."""
        ids = {each["raylet"]["metricsExportPort"]: node for node, each in self.alive_nodes().items()}
        return {ids[node.metrics]: node for node in nodes}

    def stop(self) -> None:
        """End every process of every node, and see them gone."""
        started = [one for node in self.nodes for one in node.processes()]
        for node in reversed(self.nodes):
            node.terminate()
        _, alive = psutil.wait_procs(started, timeout=5)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(alive, timeout=10)
        self._rest.close()
        shutil.rmtree(self.folder, ignore_errors=True)
