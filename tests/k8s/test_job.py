"""The load test's Job fits the cluster that the manifests describe."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from dsde.cli import _parser
from loadtest.options import options
from tests.k8s.manifests import K8S, Manifest, one, serve_config
from tests.k8s.test_schemas import KUBERNETES

JOB = K8S.parent / "loadtest" / "job.yaml"


def objects() -> dict[str, Manifest]:
    return {each["kind"]: each for each in yaml.safe_load_all(JOB.read_text())}


def container() -> Manifest:
    (found,) = objects()["Job"]["spec"]["template"]["spec"]["containers"]
    return found


def given() -> argparse.Namespace:
    assert container()["command"] == ["dsde"]
    return _parser().parse_args(container()["args"])


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_it(version: str) -> None:
    for each in objects().values():
        kubernetes_validate.validate(each, version, strict=True)
        assert each["metadata"]["namespace"] == one("cpu", "Namespace", "dsde")["metadata"]["name"]


def test_the_load_test_takes_its_arguments(tmp_path: Path) -> None:
    arguments = given()
    arguments.report = tmp_path / arguments.report.name
    taken = options(arguments)
    assert set(taken.protocols) == {"http", "grpc"}
    assert taken.duration_s < objects()["Job"]["spec"]["activeDeadlineSeconds"]


def test_it_calls_the_services_of_the_application() -> None:
    http, grpc = serve_config("cpu")["http_options"]["port"], serve_config("cpu")["grpc_options"]["port"]
    assert given().url == f"http://dsde-serve-svc:{http}"
    assert given().address == f"{one('cpu', 'Service', 'dsde-grpc')['metadata']['name']}:{grpc}"


def test_it_runs_the_image_of_the_engines() -> None:
    version = tomllib.loads((K8S.parent / "pyproject.toml").read_text())["project"]["version"]
    assert container()["image"] == f"dsde:{version}-cpu"


def test_what_it_mounts_and_writes_is_there() -> None:
    spec = objects()["Job"]["spec"]["template"]["spec"]
    mounts = {each["name"]: each["mountPath"] for each in container()["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in spec["volumes"]}
    assert str(given().report).startswith(mounts["reports"])
    (key,) = [each["valueFrom"]["secretKeyRef"] for each in container()["env"] if "valueFrom" in each]
    assert f"create secret generic {key['name']} --from-literal={key['key']}=" in JOB.read_text()
    (claim,) = [each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"] if "emptyDir" not in each]
    assert claim == objects()["PersistentVolumeClaim"]["metadata"]["name"]
