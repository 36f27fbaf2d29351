"""What a replica publishes for routers, and the table of request classes it learns from finished requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["ClassTable", "ClassStats", "ReplicaStats"]

MEMORY = 0.98
"""Weight that a class's sums keep when another of its requests finishes: an average over the newest fifty."""
REMEMBERED = 256
PUBLISHED = 32
"""Classes that a replica remembers and publishes, the most recently finished ones."""


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Sums over a class's finished requests, the newest weighing most.

    requests: their weight. output: tokens of their answers. tokens, steps: decoded tokens and decoding steps; their
    ratio is what one step brings. drafted, accepted: draft tokens verified and accepted.
    """

    requests: float = 0.0
    output: float = 0.0
    tokens: float = 0.0
    steps: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def __add__(self, other: ClassStats) -> ClassStats:
        return self._combined(other, 1.0)

    def __sub__(self, other: ClassStats) -> ClassStats:
        return self._combined(other, -1.0)

    def _combined(self, other: ClassStats, sign: float) -> ClassStats:
        return ClassStats(
            self.requests + sign * other.requests,
            self.output + sign * other.output,
            self.tokens + sign * other.tokens,
            self.steps + sign * other.steps,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
        )

    def aged(self) -> ClassStats:
        """These sums when one more request is to be added."""
        return ClassStats(*(MEMORY * value for value in self.values()))

    def values(self) -> tuple[float, float, float, float, float, float]:
        """The fields in order, as they are published."""
        return self.requests, self.output, self.tokens, self.steps, self.drafted, self.accepted


class ClassTable:
    """Classes by name, of bounded number: the one that finished nothing for longest is forgotten."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._classes: OrderedDict[str, ClassStats] = OrderedDict()

    def finish(self, classes: Iterable[str], one: ClassStats) -> None:
        """Add a finished request to each of its classes."""
        for name in classes:
            self._classes[name] = self._classes.pop(name, ClassStats()).aged() + one
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
    a + b t. draft_ms: one draft step. Both None until the engine has measured them. length: mean speculation length,
    draft tokens per request and step. straggler_share: share of decoding time that requests waited for longer members
    of their batch. draining: takes nothing new.
    """

    number: int
    running: int
    waiting: int
    slots: int
    kv_use: float = 0.0
    verify_ms: tuple[float, float] | None = None
    draft_ms: float | None = None
    length: float = 0.0
    straggler_share: float = 0.0
    draining: bool = False
    classes: Mapping[str, ClassStats] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "classes": {name: one.values() for name, one in self.classes.items()}}

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
                length=float(value["length"]),
                straggler_share=float(value["straggler_share"]),
                draining=bool(value["draining"]),
                classes={str(k)[:64]: ClassStats(*map(float, v)) for k, v in list(value["classes"].items())[:PUBLISHED]},
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"routing stats {value!r} are not accepted: {type(error).__name__}: {error}") from error
        numbers = (stats.kv_use, stats.length, stats.straggler_share, stats.draft_ms or 0.0, *(stats.verify_ms or ()))
        if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
            raise ValueError(f"routing stats {value!r} are not accepted: every number is finite and at least 0")
        return stats
