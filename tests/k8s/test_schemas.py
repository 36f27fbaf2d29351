"""Every object against the schema that the API server checks it with, and no field beyond it."""

from __future__ import annotations

import copy
import functools
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.k8s.manifests import OVERLAYS, Manifest, ray_service, rendered

KUBERNETES = ("1.31", "1.37")
# Prometheus's operator defines these.
_WITHOUT_SCHEMA = {"PodMonitor", "PrometheusRule"}


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_the_objects(version: str) -> None:
    different = {json.dumps(each): each for overlay in OVERLAYS for each in rendered(overlay)}
    checked = [each for each in different.values() if each["kind"] not in _WITHOUT_SCHEMA | {"RayService"}]
    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)
    assert {each["kind"] for each in checked} == {
        "ConfigMap",
        "Deployment",
        "Namespace",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
    }


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    service = copy.deepcopy(next(each for each in rendered("cpu") if each["kind"] == "Service"))
    service["spec"]["port"] = 9000
    with pytest.raises(kubernetes_validate.ValidationError, match="port"):
        kubernetes_validate.validate(service, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kuberay_takes_the_ray_service(overlay: str) -> None:
    schema = _schema("rayservices")
    for each in rendered(overlay):
        if each["kind"] == "RayService":
            jsonschema.validate(each, schema, cls=jsonschema.Draft202012Validator)
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "dsde"},
        "spec": ray_service(overlay)["rayClusterConfig"],
    }
    jsonschema.validate(cluster, _schema("rayclusters"), cls=jsonschema.Draft202012Validator)


def test_a_field_that_kuberay_does_not_know_is_found() -> None:
    wrong: Manifest = {"apiVersion": "ray.io/v1", "kind": "RayService", "spec": copy.deepcopy(ray_service("cpu"))}
    wrong["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "dsde"
    with pytest.raises(jsonschema.ValidationError, match="imagee"):
        jsonschema.validate(wrong, _schema("rayservices"), cls=jsonschema.Draft202012Validator)


@functools.cache
def _schema(plural: str) -> dict[str, Any]:
    folder = os.environ.get("KUBERAY_CRD_DIR")
    if folder is None:
        pytest.skip("KUBERAY_CRD_DIR names no folder with KubeRay's ray.io_*.yaml")
    definition = yaml.load((Path(folder) / f"ray.io_{plural}.yaml").read_text(), yaml.CSafeLoader)
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    return _closed(version["schema"]["openAPIV3Schema"])


def _closed(schema: Any) -> Any:
    """The schema with no room for fields that it does not name; the API server would drop them in silence."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if "properties" in schema and isinstance(schema["properties"], dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
