"""Recorded drafts and their fate, so that a policy can be replayed in seconds; and traces made up for tests.

File format: JSON lines, gzipped where the name ends in .gz. The first line is a header
{"format": "dsde-trace", "version": 1, "length": K, ...notes}, every other line one request:
{"id", "workload", "temperature", "rounds": [{"p": [...], "h": [...], "kld": [...], "overlap": [...], "a": n}, ...]}.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

__all__ = ["RequestTrace", "Round", "Trace", "synthesize"]

DIGITS = 4


@dataclass(frozen=True, slots=True)
class Round:
    """One drafting of a request and its verification, each list as long as the draft; slots in order.

    top_prob: max_v q. entropy: H(q), nats. kld: D_KL(p || q), nats. overlap: sum_v min(p, q). Slots after the first
    rejection were drafted on a wrong prefix; their values count as what a drafter would have said there.
    accepted: draft tokens accepted.
    """

    top_prob: tuple[float, ...]
    entropy: tuple[float, ...]
    kld: tuple[float, ...]
    overlap: tuple[float, ...]
    accepted: int

    def to_json(self) -> dict[str, Any]:
        """The object in a trace file; four digits after the point."""
        lists = {"p": self.top_prob, "h": self.entropy, "kld": self.kld, "overlap": self.overlap}
        return {**{name: [round(v, DIGITS) for v in values] for name, values in lists.items()}, "a": self.accepted}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Round:
        """Read it back; ValueError where the lists differ in length or more was accepted than drafted."""
        top, entropy, kld, overlap = (tuple(value[name]) for name in ("p", "h", "kld", "overlap"))
        if len({len(top), len(entropy), len(kld), len(overlap)}) != 1 or not 0 <= value["a"] <= len(top):
            raise ValueError(f"round {value!r} is not accepted: give four lists of one length, and 0 <= a <= length")
        return cls(top, entropy, kld, overlap, value["a"])


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request drafted at a fixed length to its end. workload: its class. temperature: 0 = greedy."""

    request_id: str
    workload: str
    temperature: float
    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of one model pair, recorded with `length` draft tokens at every step (policy `static`).

    A long length matters: a replay never drafts deeper than what was recorded. notes: anything worth keeping, such as
    the pair's name, as JSON.
    """

    length: int
    requests: tuple[RequestTrace, ...]
    notes: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file, replacing it."""
        with _open(path, "wt") as file:
            header = {"format": "dsde-trace", "version": 1, "length": self.length, **self.notes}
            file.write(json.dumps(header) + "\n")
            for request in self.requests:
                line = {
                    "id": request.request_id,
                    "workload": request.workload,
                    "temperature": request.temperature,
                    "rounds": [r.to_json() for r in request.rounds],
                }
                file.write(json.dumps(line, separators=(",", ":")) + "\n")

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file; ValueError where it is not a trace."""
        with _open(path, "rt") as file:
            header = json.loads(file.readline() or "{}")
            if header.get("format") != "dsde-trace" or header.get("version") != 1:
                raise ValueError(f"{path} is not accepted: its first line is no header of a dsde-trace, version 1")
            requests = []
            for line in file:
                value = json.loads(line)
                rounds = tuple(Round.from_json(r) for r in value["rounds"])
                requests.append(RequestTrace(value["id"], value["workload"], value["temperature"], rounds))
        notes = {name: v for name, v in header.items() if name not in ("format", "version", "length")}
        return cls(header["length"], tuple(requests), notes)

    def only(self, keep: Iterable[int]) -> Trace:
        """The trace of the requests at positions `keep`."""
        return Trace(self.length, tuple(self.requests[index] for index in keep), self.notes)


def synthesize(
    *,
    requests: int,
    rounds: int,
    acceptance: float,
    temperature: float = 0.0,
    length: int = 10,
    confidence: float = 1.0,
    spread: float = 0.5,
    seed: int = 0,
) -> Trace:
    """A made-up trace. Each slot has a difficulty z and is accepted with chance sigmoid(z), which is its overlap.

    acceptance: median chance of a slot. spread: standard deviation of z between requests; within one it is 2 when
    greedy and 1 otherwise, with a correlation of .3 from slot to slot. confidence: how well the drafter knows z: its
    top probability is the chance under z plus noise of standard deviation 1 / confidence.
    """
    rng = random.Random(seed)
    within = 2.0 if temperature == 0.0 else 1.0
    middle = math.log(acceptance / (1.0 - acceptance))
    made = []
    for index in range(requests):
        own = middle + rng.gauss(0.0, spread)
        wave = rng.gauss(0.0, 1.0)
        path = []
        for _ in range(rounds):
            slots = []
            accepted, alive = 0, True
            for _ in range(length):
                wave = 0.3 * wave + math.sqrt(1.0 - 0.09) * rng.gauss(0.0, 1.0)
                z = own + within * wave
                chance = 1.0 / (1.0 + math.exp(-z))
                top = 1.0 / (1.0 + math.exp(-(z + rng.gauss(0.0, 1.0 / confidence))))
                top = min(0.9999, max(0.02, top))
                entropy = -top * math.log(top) + (1.0 - top) * (2.0 - math.log(1.0 - top))
                kld = max(0.0, -math.log(max(chance, 1e-4)) + rng.gauss(0.0, 0.3))
                slots.append((top, entropy, kld, chance))
                alive = alive and rng.random() < chance
                accepted += alive
            tops, entropies, klds, chances = zip(*slots, strict=True)
            path.append(Round(tops, entropies, klds, chances, accepted))
        made.append(RequestTrace(f"made-up-{index}", "made-up", temperature, tuple(path)))
    return Trace(length, tuple(made), {"acceptance": acceptance, "seed": seed})


def _open(path: Path, mode: str) -> IO[str]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    return opener(path, mode, encoding="utf-8")
