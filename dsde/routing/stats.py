"""What a replica publishes for routers, and the table of request classes it learns from finished requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = ["ClassStats", "ClassTable", "ReplicaStats", "acceptance"]

MEMORY = 0.98
"""Weight that a class's sums keep when another of its requests finishes: an average over the newest fifty."""
REMEMBERED = 256
PUBLISHED = 32
"""Classes that a replica remembers and publishes, the most recently finished ones."""


class ClassStats(NamedTuple):
    """Sums over a class's finished requests, the newest weighing most.

    requests: their weight. output: tokens of their answers. steps: decoding steps with drafts. drafted, accepted: draft
    tokens verified and accepted in them.
    """

    requests: float = 0.0
    output: float = 0.0
    steps: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def plus(self, other: ClassStats, times: float = 1.0) -> ClassStats:
        """These sums and `times` the other's."""
        return ClassStats(*(mine + times * its for mine, its in zip(self, other, strict=True)))


def acceptance(steps: float, drafted: float, accepted: float) -> float:
    """alpha, the chance that a draft token is accepted after its predecessors were.

    Solves accepted / steps = alpha + alpha^2 + ... + alpha^k at k = drafted / steps: later drafts of a step count only
    after earlier ones, so that accepted / drafted would fall with the length. steps and drafted must be above 0.
    """
    length, goal = drafted / steps, accepted / steps
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        emitted = middle * (1.0 - middle**length) / (1.0 - middle)
        low, high = (middle, high) if emitted < goal else (low, middle)
    return (low + high) / 2


class ClassTable:
    """Classes by name, of bounded number: the one that finished nothing for longest is forgotten."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._classes: OrderedDict[str, ClassStats] = OrderedDict()

    def finish(self, classes: Iterable[str], one: ClassStats) -> None:
        """Add a finished request to each of its classes."""
        for name in classes:
            self._classes[name] = one.plus(self._classes.pop(name, ClassStats()), MEMORY)
        while len(self._classes) > self._remembered:
            self._classes.popitem(last=False)

    def newest(self, count: int = PUBLISHED) -> dict[str, ClassStats]:
        """The classes that finished a request last, at most `count`."""
        names = list(self._classes)[-count:]
        return {name: self._classes[name] for name in names}


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One publication of one replica.

    number: counts its publications, so that a router sees that it lives. running, waiting: requests in the engine.
    slots: requests that decode together. kv_use: share of the KV cache in use. verify_ms: (a, b) of a step of t tokens,
    a + b t. draft_ms: one draft step. prompt_ms: one prompt token. Each None until the engine has measured it. length:
    mean speculation length, draft tokens per request and step. straggler_share: share of decoding time that requests
    waited for longer members of their batch. priced: whether its policy drafts as deep as pays; else its depth is taken
    to be `length`. draining: takes nothing new.
    """

    number: int
    running: int
    waiting: int
    slots: int
    kv_use: float = 0.0
    verify_ms: tuple[float, float] | None = None
    draft_ms: float | None = None
    prompt_ms: float | None = None
    length: float = 0.0
    straggler_share: float = 0.0
    priced: bool = True
    draining: bool = False
    classes: Mapping[str, ClassStats] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "classes": {name: list(one) for name, one in self.classes.items()}}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ReplicaStats:
        """Read it back. ValueError for anything else: another version may run on the other side."""
        try:
            verify = value["verify_ms"]
            stats = cls(
                number=int(value["number"]),
                running=max(0, int(value["running"])),
                waiting=max(0, int(value["waiting"])),
                slots=max(1, int(value["slots"])),
                kv_use=float(value["kv_use"]),
                verify_ms=None if verify is None else (float(verify[0]), float(verify[1])),
                draft_ms=None if value["draft_ms"] is None else float(value["draft_ms"]),
                prompt_ms=None if value["prompt_ms"] is None else float(value["prompt_ms"]),
                length=float(value["length"]),
                straggler_share=float(value["straggler_share"]),
                priced=bool(value["priced"]),
                draining=bool(value["draining"]),
                classes={
                    str(k)[:64]: ClassStats(*map(float, v)) for k, v in list(value["classes"].items())[:PUBLISHED]
                },
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"routing stats {value!r} are not accepted: {type(error).__name__}: {error}") from error
        costs = (stats.draft_ms or 0.0, stats.prompt_ms or 0.0, *(stats.verify_ms or ()))
        numbers = (stats.kv_use, stats.length, stats.straggler_share, *costs)
        if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
            raise ValueError(f"routing stats {value!r} are not accepted: every number is finite and at least 0")
        return stats
