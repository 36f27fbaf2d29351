"""The manifest of a model directory: which recipe made it, and the size and SHA-256 of every file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

__all__ = ["MANIFEST", "fault", "sha256", "write"]

MANIFEST = "manifest.json"


def sha256(file: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write(directory: Path, recipe: dict[str, object]) -> None:
    """Describe every file that lies in `directory` now."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(directory.iterdir())
        if file.name != MANIFEST
    }
    (directory / MANIFEST).write_text(json.dumps({"recipe": recipe, "files": files}, indent=1) + "\n")


def fault(directory: Path, recipe: dict[str, object], *, verify: bool = False) -> str | None:
    """Why `directory` does not hold what `recipe` makes, or None when it does.

    Sizes are compared always, contents (SHA-256) only with `verify`: that reads every byte.
    """
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        files, made_by = manifest["files"], manifest["recipe"]
    except FileNotFoundError:
        return "not prepared"
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"{MANIFEST} is not readable"
    if made_by != recipe:
        return "made by another recipe"
    for name, expected in files.items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if verify and sha256(file) != expected["sha256"]:
            return f"{name} has another SHA-256 than when it was written"
    return None
