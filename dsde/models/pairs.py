"""The prepared pairs: which models they consist of and where these lie. Making them is prepare's work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dsde.models.manifest import fault
from dsde.models.recipe import MODELS, Recipe

__all__ = ["PAIRS", "SETS", "Pair", "models_dir", "pair"]


@dataclass(frozen=True, slots=True)
class _Members:
    target: str
    draft: str
    prepared_by: str
    description: str


PAIRS = {
    "embedded": _Members("target-120", "draft-8", "embedded", "0.45 B target, draft right in about 7 of 10 tokens"),
    "bench": _Members("target-300", "draft-10", "bench", "1.1 B target, draft right in about 6 of 10 tokens"),
    "bench-low": _Members("target-300", "draft-20", "bench", "1.1 B target, draft right in about 2 of 10 tokens"),
}

SETS: dict[str, tuple[str, ...]] = {
    "embedded": ("target-120", "draft-8"),
    "bench": ("target-300", "draft-10", "draft-20"),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A prepared pair; target and draft are model directories that Transformers and vLLM load as they are."""

    name: str
    target: Path
    draft: Path
    description: str


def models_dir() -> Path:
    """Directory of the prepared models: DSDE_MODELS_DIR, else dsde/models in the user's cache."""
    place = os.environ.get("DSDE_MODELS_DIR")
    return Path(place).expanduser() if place else Path.home() / ".cache" / "dsde" / "models"


def pair(name: str) -> Pair:
    """The pair `name`, its files present and of the right size.

    Raises ValueError for a name that no pair has, FileNotFoundError naming the command when the pair is not prepared.
    """
    if name not in PAIRS:
        raise ValueError(f"model.pair = {name!r} is unknown; accepted: {', '.join(PAIRS)}")
    members, root = PAIRS[name], models_dir()
    for model in (members.target, members.draft):
        recipe: Recipe = MODELS[model]
        if found := fault(root / model, recipe.to_dict()):
            command = f"dsde models prepare {members.prepared_by}"
            raise FileNotFoundError(f"model.pair = {name!r} is not ready: {root / model}: {found}. Run `{command}`")
    return Pair(name, root / members.target, root / members.draft, members.description)
