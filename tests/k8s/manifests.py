"""The manifests as kustomize renders them, and what the tests ask of them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = ("cpu", "gpu", "gpu-redis")

Manifest = dict[str, Any]


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """The objects of an overlay, as `kubectl apply -k` would send them."""
    if (kustomize := shutil.which("kustomize")) is not None:
        command = [kustomize, "build"]
    elif (kubectl := shutil.which("kubectl")) is not None:
        command = [kubectl, "kustomize"]
    else:
        pytest.skip("neither kustomize nor kubectl is installed")
    made = subprocess.run([*command, K8S / "overlays" / overlay], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return tuple(yaml.safe_load_all(made.stdout))


def one(overlay: str, kind: str, name: str) -> Manifest:
    found = [each for each in rendered(overlay) if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1, f"{kind} {name}: {len(found)} in overlay {overlay}"
    return found[0]


def ray_service(overlay: str) -> Manifest:
    return one(overlay, "RayService", "dsde")["spec"]


def serve_config(overlay: str) -> Manifest:
    """What the operator sends to Serve's REST API."""
    return yaml.safe_load(ray_service(overlay)["serveConfigV2"])


def application(overlay: str) -> Manifest:
    (found,) = serve_config(overlay)["applications"]
    return found


def options(overlay: str, deployment: str) -> Manifest:
    (found,) = [each for each in application(overlay)["deployments"] if each["name"] == deployment]
    return found


def groups(overlay: str) -> dict[str, Manifest]:
    """The pods of the Ray cluster: head and worker, each with rayStartParams and a template."""
    cluster = ray_service(overlay)["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"], "worker": workers}


def pod_specs(overlay: str) -> Iterator[tuple[str, Manifest]]:
    """(name, spec) of every pod that the overlay brings up."""
    for name, group in groups(overlay).items():
        yield name, group["template"]["spec"]
    for each in rendered(overlay):
        if each["kind"] == "Deployment":
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def containers(overlay: str) -> Iterator[tuple[str, Manifest]]:
    """(pod/name, container) of every container, the autoscaler's included."""
    for pod, spec in pod_specs(overlay):
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield f"{pod}/{container['name']}", container
    yield "head/autoscaler", ray_service(overlay)["rayClusterConfig"]["autoscalerOptions"]


def ports(container: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container.get("ports", [])}


def environment(container: Manifest) -> dict[str, str]:
    """The variables that have a value of their own."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector takes an object with these labels."""
    exact = selector.get("matchLabels", {})
    among = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in among)
    return all(labels.get(name) == value for name, value in exact.items()) and all(
        labels.get(each["key"]) in each["values"] for each in among
    )


def labels(overlay: str) -> dict[str, dict[str, str]]:
    """Labels of each kind of pod, with those that KubeRay adds to its own."""
    templates = {name: group["template"]["metadata"] for name, group in groups(overlay).items()}
    found = {name: each["labels"] | {"ray.io/node-type": name} for name, each in templates.items()}
    # KubeRay's default for workers; readiness decides whether traffic comes.
    found["worker"] = found["worker"] | {"ray.io/serve": "true"}
    collector = one(overlay, "Deployment", "dsde-collector")["spec"]["template"]["metadata"]["labels"]
    return found | {"collector": collector}
