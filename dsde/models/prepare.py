"""Makes the prepared models, once. Safe to repeat, to interrupt and to run twice at the same time."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsde.models import manifest, source
from dsde.models.deepen import deepen
from dsde.models.pairs import SETS, models_dir
from dsde.models.perturb import perturb
from dsde.models.recipe import MODELS

__all__ = ["prepare"]


def prepare(name: str, progress: Callable[[str], None] = print, *, verify: bool = False) -> Path:
    """Make the models of the set `name` (embedded, bench or all) that are not there yet; returns their directory.

    A model that is there is kept when its recipe and file sizes match; with `verify` its SHA-256 sums must match too.
    Each model appears whole or not at all: it is written beside its place and then renamed.
    Raises ValueError for an unknown set, RuntimeError when the source cannot be had, OSError when the disk is full.
    """
    if name != "all" and name not in SETS:
        raise ValueError(f"models prepare {name}: unknown set; accepted: {', '.join(SETS)}, all")
    wanted = list(dict.fromkeys(m for members in (SETS.values() if name == "all" else [SETS[name]]) for m in members))
    root = models_dir()
    root.mkdir(parents=True, exist_ok=True)
    with _only_one(root, progress):
        missing = []
        for model in wanted:
            found = manifest.fault(root / model, MODELS[model].to_dict(), verify=verify)
            progress(f"{model}: {found or ('verified' if verify else 'ready')}")
            if found:
                missing.append(model)
        if missing:
            _make(missing, root, progress)
    return root


def _make(models: list[str], root: Path, progress: Callable[[str], None]) -> None:
    started = time.monotonic()
    steps = len(models) + 1

    def tell(step: int, text: str) -> None:
        progress(f"[{step}/{steps}] {time.monotonic() - started:4.0f} s  {text}")

    with source.source_file(progress) as file:
        tell(1, f"reading and dequantizing {file.name}")
        base, tokenizer = source.read(file)
    for step, name in enumerate(models, start=2):
        recipe = MODELS[name]
        tell(step, f"making {name} ({recipe.extra_layers} extra layers, {recipe.noise:.0%} noise)")
        model = deepen(base, recipe.extra_layers) if recipe.extra_layers else base
        model = perturb(model, recipe.noise, recipe.seed) if recipe.noise else model
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        try:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            manifest.write(scratch, recipe.to_dict())
            # Other users, as in a container, read the models too: mkdtemp and safetensors let only the owner.
            scratch.chmod(0o755)
            for file in scratch.iterdir():
                file.chmod(0o644)
            place = root / name
            if place.exists():
                shutil.rmtree(place)
            scratch.rename(place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        size = sum(f.stat().st_size for f in place.iterdir()) / 2**30
        tell(step, f"{name} is ready ({size:.2f} GiB)")


@contextmanager
def _only_one(root: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with (root / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another run that prepares models in {root}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
