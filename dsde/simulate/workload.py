"""What is sent: mixes of kinds of requests, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dsde.control.trace import Trace
from dsde.routing.request import Request, describe

__all__ = ["MIXES", "Arrival", "Group", "Kind", "Mix", "arrivals", "groups"]

VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Group:
    """Recorded requests of one class. paths: for each, the draft tokens accepted in each of its rounds.

    survival: [K], share of rounds in which slot j and all before it were accepted.
    """

    name: str
    paths: tuple[tuple[int, ...], ...]
    survival: tuple[float, ...]


def groups(trace: Trace) -> list[Group]:
    """The trace's requests by class and temperature, the best accepted class first. ValueError for an empty trace."""
    by_class: dict[tuple[str, float], list[tuple[int, ...]]] = {}
    for request in trace.requests:
        if request.rounds:
            path = tuple(one.accepted for one in request.rounds)
            by_class.setdefault((request.workload, request.temperature), []).append(path)
    if not by_class:
        raise ValueError("the trace is not accepted: it holds no request with a verified draft")
    found = []
    for (workload, temperature), paths in by_class.items():
        accepted = [a for path in paths for a in path]
        survival = tuple(sum(a > j for a in accepted) / len(accepted) for j in range(trace.length))
        found.append(Group(f"{workload}, T={temperature:g}", tuple(paths), survival))
    return sorted(found, key=lambda group: -sum(group.survival))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request of a mix.

    share: of the requests. prompt, output: median length in tokens and standard deviation of its logarithm; an answer
    ends at max_tokens at the latest. acceptance: 0 = the best accepted class of the trace, 1 = the worst. system: which
    system prompt it starts with; one of `prefixes` of `prefix_tokens` tokens each.
    """

    name: str
    share: float
    prompt: tuple[int, float]
    output: tuple[int, float]
    max_tokens: int
    acceptance: float = 0.5
    temperature: float = 0.0
    system: str = "chat"
    prefixes: int = 1
    prefix_tokens: int = 24


@dataclass(frozen=True, slots=True)
class Mix:
    """Kinds of requests, and how fast the replicas are. slowest: speed of the last replica, 1 = as the others."""

    kinds: tuple[Kind, ...]
    slowest: float = 1.0


_CHAT = Kind("chat", 0.4, (120, 0.8), (150, 0.7), 512, 0.4, 0.7)
_QUESTION = Kind("question", 0.15, (60, 0.5), (20, 0.5), 512, 0.4)
_CODE = Kind("code", 0.2, (500, 0.7), (350, 0.6), 1024, 0.0, system="code", prefix_tokens=96)
_SUMMARY = Kind("summary", 0.1, (1500, 0.4), (90, 0.4), 256, 0.2, system="summary")
_STORY = Kind("story", 0.15, (60, 0.5), (550, 0.4), 1024, 1.0, 1.0)

MIXES: Mapping[str, Mix] = {
    "mixed": Mix((_CHAT, _QUESTION, _CODE, _SUMMARY, _STORY)),
    "uniform": Mix((Kind("chat", 1.0, (120, 0.3), (150, 0.3), 512, 0.4),)),
    "long_outputs": Mix(
        (Kind("question", 0.7, (60, 0.5), (30, 0.5), 1024, 0.4), Kind("story", 0.3, (60, 0.5), (600, 0.3), 1024, 0.8))
    ),
    "long_prompts": Mix(
        (Kind("chat", 0.7, (100, 0.5), (150, 0.5), 512, 0.4), Kind("summary", 0.3, (2500, 0.3), (90, 0.4), 512, 0.2))
    ),
    "shared_prefix": Mix(
        (
            Kind("agent", 0.7, (80, 0.5), (120, 0.6), 512, 0.3, system="agent", prefixes=12, prefix_tokens=1536),
            Kind("chat", 0.3, (120, 0.8), (150, 0.7), 512, 0.4),
        )
    ),
    "stragglers": Mix(
        (
            Kind("code", 0.5, (120, 0.3), (200, 0.4), 512, 0.0, system="code"),
            Kind("story", 0.5, (120, 0.3), (200, 0.4), 512, 1.0, 1.0),
        )
    ),
    "slow_replica": Mix((_CHAT, _QUESTION, _CODE, _SUMMARY, _STORY), slowest=0.5),
}


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request on its way. number: counts them. time: ms since the start, for a rate of one request per ms. output:
    tokens it will emit. group: index of its recorded class. path, at: accepted drafts of each step, and its first one.
    """

    number: int
    time: float
    request: Request
    output: int
    group: int
    path: tuple[int, ...]
    at: int


def arrivals(mix: Mix, recorded: list[Group], requests: int, seed: int) -> list[Arrival]:
    """`requests` requests in order of arrival, at random times of a Poisson process of rate 1."""
    rng = random.Random(seed)
    ids = np.random.default_rng(seed)
    prefixes: dict[tuple[str, int], list[int]] = {}
    weights = [kind.share for kind in mix.kinds]
    time, made = 0.0, []
    for number, kind in enumerate(rng.choices(mix.kinds, weights, k=requests)):
        time += rng.expovariate(1.0)
        group = round(kind.acceptance * (len(recorded) - 1))
        path = rng.choice(recorded[group].paths)
        which = (kind.system, rng.randrange(kind.prefixes))
        if which not in prefixes:
            prefixes[which] = ids.integers(VOCABULARY, size=kind.prefix_tokens).tolist()
        own = ids.integers(VOCABULARY, size=_length(rng, kind.prompt)).tolist()
        request = describe(prefixes[which] + own, temperature=kind.temperature, max_tokens=kind.max_tokens)
        output = min(kind.max_tokens, _length(rng, kind.output))
        made.append(Arrival(number, time, request, output, group, path, rng.randrange(len(path))))
    return made


def _length(rng: random.Random, length: tuple[int, float]) -> int:
    median, spread = length
    return max(1, round(median * rng.lognormvariate(0.0, spread)))
