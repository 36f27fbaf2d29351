#!/usr/bin/env python3
"""Runs before Kubernetes stops a worker: returns when Serve has left this Ray node and nothing is in progress on it.

Serve starts replacements elsewhere, sends this node nothing new, and lets what it has end. Kubernetes bounds the wait.
Where the head has gone first, as when a whole cluster is deleted, what is in progress ends all the same.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from time import sleep

POLL_S = 2
SETTLE_S = 15
"""Endpoints elsewhere forget this pod, and Ray's metrics catch up."""
DEADLINE_S = 600
ONGOING = re.compile(
    r"^ray_serve_(?:num_ongoing_(?:http|grpc)_requests|replica_processing_queries)\b.* (\S+)$", re.MULTILINE
)


def main() -> None:
    head, node = os.environ["RAY_ADDRESS"], os.environ.get("NODE_ID") or own_node()
    dashboard = f"http://{head.rpartition(':')[0]}:{os.environ.get('DASHBOARD_PORT', 8265)}"
    metrics = f"http://127.0.0.1:{os.environ.get('METRICS_PORT', 8080)}"
    ask_to_drain(head, node)
    sleep(SETTLE_S)
    while in_use(dashboard, metrics, node):
        sleep(POLL_S)


def own_node(processes: Path = Path("/proc")) -> str:
    """The id of the Ray node in this pod, as its raylet was started with it; nothing where no raylet runs."""
    for arguments in processes.glob("[0-9]*/cmdline"):
        try:
            words = arguments.read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        for word in words:
            if word.startswith("--node_id="):
                return word.partition("=")[2]
    return ""


def ask_to_drain(head: str, node: str) -> None:
    command = ["ray", "drain-node", "--address", head, "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "Kubernetes stops this pod", "--deadline-remaining-seconds", str(DEADLINE_S)]
    try:
        subprocess.run(command, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"Ray did not take the request to drain this node: {error}", file=sys.stderr)


def in_use(dashboard: str, metrics: str, node: str) -> bool:
    """Whether Serve names a replica or a proxy on this node; where it is silent, whether the node has requests."""
    try:
        told = json.loads(fetch(f"{dashboard}/api/serve/applications/"))
    except (OSError, ValueError):
        return ongoing(metrics) > 0
    deployments = [app["deployments"] for app in told["applications"].values()]
    if {} in deployments:
        # An application that Serve is building: its replicas run, and are not listed.
        return True
    replicas = {replica["node_id"] for each in deployments for one in each.values() for replica in one["replicas"]}
    return node in replicas | told["proxies"].keys()


def ongoing(metrics: str) -> float:
    try:
        return sum(map(float, ONGOING.findall(fetch(f"{metrics}/metrics"))))
    except (OSError, ValueError):
        return 0.0


def fetch(url: str) -> str:
    # No proxy of the environment stands between the pods of a cluster.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"x-ray-authorization": f"Bearer {os.environ.get('RAY_AUTH_TOKEN', '')}"}
    with opener.open(urllib.request.Request(url, headers=headers), timeout=5) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    main()
